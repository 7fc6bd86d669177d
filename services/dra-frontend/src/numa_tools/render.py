# SPDX-License-Identifier: Apache-2.0
"""Values of the documents as people read them: the same in ``status``, ``explain`` and ``inspect``. Pure.

``kubectl numa`` (``kubectl_numa.quantity``) and the page (``values.js``) format amounts of memory by the same rule.
"""

from numa_contract.state.words import ENFORCED, KEPT_BY, UNITS, USES


def format_bytes(amount: int) -> str:
    """Returns bytes with at most one decimal, cut and not rounded, so that nothing looks larger than it is: ``1.5Gi``.

    A place that compares amounts needs the exact text, ``numa_contract.quantity.format_quantity``.
    """
    power = min(max(amount.bit_length() - 1, 0) // 10, len(UNITS))
    tenths = amount * 10 >> (10 * power)
    return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{('', *UNITS)[power]}"


def cpu_use(use: str) -> str:
    """Returns the word for the use of a CPU with its meaning."""
    return f"{use}: {USES[use]}"


def kept_by(exclusivity: str) -> str:
    """Returns what keeps others off the CPUs of a claim; the word itself if it is of a newer release."""
    return KEPT_BY.get(exclusivity, exclusivity)


def enforced_word(status: str) -> str:
    """Returns whether a claim is enforced, by the status of its condition ``Enforced``."""
    return ENFORCED.get(status, ENFORCED["Unknown"])
