# SPDX-License-Identifier: Apache-2.0
"""A problem consists of a sentence and the code of its cause."""

import errno
import os

import pytest
from nri_backend.claims.authorization import Reason, Rejection
from nri_backend.node.cgroups import CgroupAccessError, MissingFileError, access_error
from nri_backend.problems import NO_PROBLEM, Problem, code_of, joined, read_problem
from numa_contract.backend_codes import BackendCode

DIFFERENT = Problem("cpuset.cpus must be 2-3", BackendCode.SETTINGS_NOT_APPLIED)
DENIED = Problem("cpuset.mems: Permission denied", BackendCode.PERMISSION_DENIED)
REFUSED = Problem("cpu.max: Invalid argument", BackendCode.CGROUP_FILE_REFUSED)


def test_a_problem_is_a_string_with_a_code() -> None:
    """A problem is logged and compared as a string. NO_PROBLEM is falsy and has no code."""
    assert (DENIED == "cpuset.mems: Permission denied", f"{DENIED}", DENIED.code_text) == (
        True,
        str(DENIED),
        DENIED.code,
    )
    assert (bool(NO_PROBLEM), NO_PROBLEM.code, NO_PROBLEM.code_text) == (False, None, "")


@pytest.mark.parametrize(
    ("several", "text", "code"),
    [
        ([], "", None),
        ([DIFFERENT], DIFFERENT, BackendCode.SETTINGS_NOT_APPLIED),
        ([DIFFERENT, DENIED, REFUSED], f"{DIFFERENT}; {DENIED}; {REFUSED}", BackendCode.PERMISSION_DENIED),
        ([REFUSED, DENIED], f"{REFUSED}; {DENIED}", BackendCode.CGROUP_FILE_REFUSED),
    ],
)
def test_several_problems_have_the_first_code_that_explains_the_cause(
    several: list[Problem], text: str, code: BackendCode | None
) -> None:
    """SETTINGS_NOT_APPLIED names only the effect, so any other problem's code takes precedence."""
    found = joined(several)
    assert (found, found.code) == (text, code)


@pytest.mark.parametrize(
    ("number", "code", "of_cgroup"),
    [
        (errno.EACCES, BackendCode.PERMISSION_DENIED, BackendCode.PERMISSION_DENIED),
        (errno.EPERM, BackendCode.OPERATION_NOT_PERMITTED, BackendCode.OPERATION_NOT_PERMITTED),
        (errno.EROFS, BackendCode.READ_ONLY_FILE_SYSTEM, BackendCode.READ_ONLY_FILE_SYSTEM),
        (errno.ENOSPC, BackendCode.NO_SPACE_LEFT, BackendCode.CGROUP_FILE_REFUSED),
        (errno.EBUSY, BackendCode.INTERRUPTS_NOT_MOVED, BackendCode.CGROUP_FILE_REFUSED),
    ],
)
def test_an_error_has_the_code_of_its_errno(number: int, code: BackendCode, of_cgroup: BackendCode) -> None:
    """From cgroupfs, which is never full, ENOSPC means that a cpuset would be left without a CPU."""
    error = OSError(number, os.strerror(number), "file")
    assert code_of(error, BackendCode.INTERRUPTS_NOT_MOVED) is code
    refused = access_error(error, "/sys/fs/cgroup/a/cpuset.cpus", os.strerror(number), "2-3")
    assert (refused.code, refused.problem.code, refused.problem) == (of_cgroup, of_cgroup, str(refused))


def test_an_error_raised_from_another_has_the_code_of_the_original() -> None:
    """For an error in the cgroup tree, HostSlices raises an OSError without an errno."""
    outer = OSError("text")
    outer.__cause__ = MissingFileError("/sys/fs/cgroup/system.slice", "cpuset.cpus")
    assert code_of(outer, BackendCode.HOST_DAEMONS_NOT_MOVED) is BackendCode.CONTROLLER_MISSING
    assert code_of(KeyError("odd"), BackendCode.HOST_DAEMONS_NOT_MOVED) is BackendCode.HOST_DAEMONS_NOT_MOVED
    assert MissingFileError("/sys/fs/cgroup/a", "cgroup.kill").code is BackendCode.KERNEL_TOO_OLD
    assert CgroupAccessError.code is BackendCode.CGROUP_FILE_REFUSED, "a controller that is missing changes one error"


@pytest.mark.parametrize(
    ("stored", "code"), [("PermissionDenied", BackendCode.PERMISSION_DENIED), ("OfALaterRelease", None), ("", None)]
)
def test_a_stored_problem_has_its_code_if_this_release_defines_it(stored: str, code: BackendCode | None) -> None:
    """Problems stored by an older release have no code."""
    found = read_problem("text", stored)
    assert (found, found.code) == ("text", code)


@pytest.mark.parametrize("reason", Reason)
def test_a_rejection_has_the_code_of_its_cause_or_of_its_reason(reason: Reason) -> None:
    """Each reason has a code, but the code of the problem that caused the rejection takes precedence."""
    assert Rejection(reason, "text").problem().code_text in set(BackendCode)
    assert Rejection(reason, "text", cause=BackendCode.CPUS_LOST).problem().code is BackendCode.CPUS_LOST
