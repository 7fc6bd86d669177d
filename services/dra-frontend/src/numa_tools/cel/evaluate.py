# SPDX-License-Identifier: Apache-2.0
"""Evaluates the selectors of devices: CEL as Kubernetes configures it, as far as it is written here (ADR 28).

An expression has one of four outcomes: true, false, an error (CelError), or unknown (CelUnsupportedError) if it depends
on a part that is not understood. As in CEL, ``&&``, ``||``, ``all`` and ``exists`` ignore an error or an unknown part
if another part decides. Otherwise unknown wins over an error, since the unknown part may decide in the cluster.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from numa_tools.cel.nodes import Scope
from numa_tools.cel.parser import Parser, Program
from numa_tools.cel.tokens import CelUnsupportedError
from numa_tools.cel.values import Budget, boolean

LONGEST: Final = 10 << 10
"""Maximum number of characters of an expression (resource.k8s.io, CELSelectorExpressionMaxLength)."""


@lru_cache(256)
def _compiled(expression: str) -> Program | str:
    """Returns the program, or the reason that the expression cannot be read. Both are cached for the next device."""
    if len(expression) > LONGEST:
        return f"has more than {LONGEST} characters"
    try:
        return Parser(expression).whole()
    except CelUnsupportedError as error:
        return str(error)


def selected(expression: str, device: Mapping[str, Any], whole: Budget | None = None) -> bool:
    """Returns True if a selector matches a device. Raises CelError and CelUnsupportedError.

    The evaluation also counts in ``whole``, the budget that it shares with others.
    """
    program = _compiled(expression)
    if isinstance(program, str):
        raise CelUnsupportedError(program)
    budget = Budget(whole=whole)
    budget.take(program.weight)
    return boolean(program.node(Scope({"device": device}, budget)), "the selector")
