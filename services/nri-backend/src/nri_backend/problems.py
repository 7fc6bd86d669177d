# SPDX-License-Identifier: Apache-2.0
"""Problems: human-readable sentences, each with a machine-readable code for the cause. All functions are pure."""

import errno
from collections.abc import Sequence
from typing import Final, Self

from numa_contract.backend_codes import BackendCode, known_code

_BY_ERRNO: Final = {
    errno.EACCES: BackendCode.PERMISSION_DENIED,
    errno.EPERM: BackendCode.OPERATION_NOT_PERMITTED,
    errno.EROFS: BackendCode.READ_ONLY_FILE_SYSTEM,
    errno.ENOSPC: BackendCode.NO_SPACE_LEFT,
}


class Problem(str):
    """A sentence with a code for its cause. The empty sentence (NO_PROBLEM) means that there is no problem.

    A problem is a ``str``, so it can be logged and inserted into other sentences. Inserting it yields a plain string,
    so its code must be passed on separately.
    """

    __slots__ = ("code",)
    code: BackendCode | None
    """Code of the cause. None if there is no problem, or if the cause requires no action from an operator."""

    def __new__(cls, text: str, code: BackendCode | None) -> Self:
        """Returns the sentence ``text`` with a code."""
        problem = super().__new__(cls, text)
        problem.code = code
        return problem

    @property
    def code_text(self) -> str:
        """The code as it is written in reports, or "" if there is none."""
        return self.code or ""


NO_PROBLEM: Final = Problem("", None)


def read_problem(text: str, code: str) -> Problem:
    """Returns a problem that was stored as text and code. The problem's code is None if this release does not define
    the code.
    """
    return Problem(text, BackendCode(known) if (known := known_code(code)) else None)


class CodedError(Exception):
    """An error with a code for its cause."""

    code: BackendCode


def code_of(error: BaseException, otherwise: BackendCode) -> BackendCode:
    """Returns the code of an error or of its direct cause, or ``otherwise`` if neither has a code or a known errno."""
    for one in (error, error.__cause__):
        if isinstance(one, CodedError):
            return one.code
        if isinstance(one, OSError) and one.errno in _BY_ERRNO:
            return _BY_ERRNO[one.errno]
    return otherwise


def joined(problems: Sequence[Problem]) -> Problem:
    """Joins several problems that concern the same cgroup into one. Returns NO_PROBLEM for an empty sequence.

    The joined problem has the first code other than SETTINGS_NOT_APPLIED, which names only the effect.
    """
    codes = [one.code for one in problems]
    specific = (code for code in codes if code is not BackendCode.SETTINGS_NOT_APPLIED)
    return Problem("; ".join(problems), next(specific, codes[0])) if problems else NO_PROBLEM
