# SPDX-License-Identifier: Apache-2.0
"""Costs of function calls in units of the budget, excluding the costs of the operands themselves. A call's cost is
known before the call is made.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from numa_tools.cel import regex
from numa_tools.cel.values import weights


def _cost_of_matches(text: Any, pattern: Any) -> int:
    if not isinstance(text, str) or not isinstance(pattern, str):
        return 0
    program = regex.compiled(pattern)
    steps = (len(text) + 1) * len(program.instructions) // 2 if isinstance(program, regex.Pattern) else 0
    return len(pattern) + steps


def _cost_of_replace(text: Any, old: Any, new: Any, *_: Any) -> int:
    if not all(isinstance(one, str) for one in (text, old, new)):
        return 0
    longest: int = len(text) + text.count(old) * len(new)
    return longest // 16


def _cost_of_last_index(text: Any, part: Any) -> int:
    """Returns the cost of searching from a string's end, which in the worst case compares the whole substring at each
    position.
    """
    return len(text) * len(part) // 1000 if isinstance(text, str) and isinstance(part, str) else 0


def _cost_of_join(items: Any, separator: Any = "") -> int:
    return len(items) * len(separator) // 16 if isinstance(items, list) and isinstance(separator, str) else 0


def _cost_of_sets(one: Any, other: Any) -> int:
    """Returns the cost of comparing every item with every other, including the values inside nested lists."""
    if not isinstance(one, list) or not isinstance(other, list):
        return 0
    return 2 * len(one) * sum(weights(other))


COSTS: Final[Mapping[str, Callable[..., int]]] = {
    "matches": _cost_of_matches,
    "replace": _cost_of_replace,
    "join": _cost_of_join,
    "lastIndexOf": _cost_of_last_index,
    "split": lambda text, *_: len(text) if isinstance(text, str) else 0,
    "sets.contains": _cost_of_sets,
    "sets.equivalent": _cost_of_sets,
    "sets.intersects": _cost_of_sets,
}
"""Functions that compute how many values a call handles in addition to its operands. The budget is charged before the
call.
"""
