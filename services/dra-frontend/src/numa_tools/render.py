# SPDX-License-Identifier: Apache-2.0
"""Formats values for display in the same way for ``status``, ``explain`` and ``inspect``. This module does no I/O.

``kubectl numa`` (``kubectl_numa.quantity``) and the web page (``values.js``) format amounts of memory by the same rule.
"""

from numa_contract.state.words import ENFORCED, KEPT_BY, UNITS, USES


def format_bytes(amount: int) -> str:
    """Formats bytes with at most one decimal place, such as ``1.5Gi``. Truncates, so no amount looks larger than it is.

    Code that compares amounts needs the exact output of ``numa_contract.quantity.format_quantity``.
    """
    power = min(max(amount.bit_length() - 1, 0) // 10, len(UNITS))
    tenths = amount * 10 >> (10 * power)
    return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{('', *UNITS)[power]}"


def cpu_use(use: str) -> str:
    """Returns the term for a CPU's use, followed by its explanation, such as ``reserved: kept for the system``."""
    return f"{use}: {USES[use]}"


def kept_by(exclusivity: str) -> str:
    """Describes the mechanism that keeps other processes off a claim's CPUs. Unknown values are returned unchanged."""
    return KEPT_BY.get(exclusivity, exclusivity)


def enforced_word(status: str) -> str:
    """Describes whether a claim is enforced, based on the status of its ``Enforced`` condition."""
    return ENFORCED.get(status, ENFORCED["Unknown"])
