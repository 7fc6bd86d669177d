# SPDX-License-Identifier: Apache-2.0
"""Evaluates device selectors, written in the subset of Kubernetes' CEL that this package supports (ADR 28).

An expression passes through three stages, each bounded because claim authors choose the expression:

  tokens   splits the text, at most 10 KiB                            limits: lengths of literals and numbers
  parser   turns the tokens into nested Python functions (``nodes``)  limits: depth and number of nested calls
  nodes    evaluates the functions for one device                     limits: ``Budget``, the number of values handled

The compiled program is cached, since the scheduler evaluates the same selector for every device.

An expression has one of four outcomes: true, false, an error (CelError), or unknown (CelUnsupportedError) if it depends
on syntax or a function that this package does not support. As in CEL, ``&&``, ``||``, ``all`` and ``exists`` ignore an
error or an unknown operand if another operand decides the result. If none decides, unknown takes precedence over an
error, because the unknown operand may decide the result in the cluster.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from numa_tools.cel.nodes import Scope
from numa_tools.cel.parser import Parser, Program
from numa_tools.cel.tokens import CelUnsupportedError
from numa_tools.cel.values import Budget, boolean

MAX_LENGTH: Final = 10 << 10
"""Maximum number of characters in an expression (resource.k8s.io, CELSelectorExpressionMaxLength)."""


@lru_cache(256)
def _compiled(expression: str) -> Program | str:
    """Returns the program, or the reason why the expression cannot be parsed. Either is cached for the next device."""
    if len(expression) > MAX_LENGTH:
        return f"has more than {MAX_LENGTH} characters"
    try:
        return Parser(expression).whole()
    except CelUnsupportedError as error:
        return str(error)


def selected(expression: str, device: Mapping[str, Any], parent: Budget | None = None) -> bool:
    """Returns True if a selector matches a device. Raises CelError and CelUnsupportedError.

    The evaluation is also charged to ``parent``, a budget shared by several evaluations.
    """
    program = _compiled(expression)
    if isinstance(program, str):
        raise CelUnsupportedError(program)
    budget = Budget(parent=parent)
    budget.charge(program.weight)
    return boolean(program.node(Scope({"device": device}, budget)), "the selector")
