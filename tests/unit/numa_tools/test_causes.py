# SPDX-License-Identifier: Apache-2.0
"""A remedy belongs to a code, either of the service or of the cause that the backend reports."""

import pytest
from numa_contract.backend_codes import BackendCode
from numa_contract.state.status import Notice, StatusCode
from numa_tools.causes import _REMEDIES, CAUSES, EXPLAINED, REFUSED, UNEXPLAINED, cause_of, remedy_of

LOG = "kubectl logs POD -c backend"


def test_each_code_of_the_service_has_a_remedy_or_a_check_of_its_own() -> None:
    """A new service code requires a row; a backend problem has the remedy of its cause."""
    others = {StatusCode.SERVICE_DOWN, StatusCode.FILE_MISSING}
    assert others.isdisjoint({*_REMEDIES} | EXPLAINED), "only the command status reports these"
    assert {*_REMEDIES} | EXPLAINED | others | {StatusCode.BACKEND_PROBLEM} == {*StatusCode}
    assert {*_REMEDIES} & EXPLAINED == set()
    for code, remedy in _REMEDIES.items():
        assert remedy_of(Notice(code=code, text="anything")) == remedy
    assert "kubectl logs POD -c frontend" in remedy_of(Notice(code="OfALaterRelease", text="anything"))


def test_each_code_of_the_backend_has_a_remedy_or_is_known_to_have_none() -> None:
    """A new code of the backend requires a row."""
    assert {*CAUSES} | UNEXPLAINED == {*BackendCode}
    assert CAUSES.keys() & UNEXPLAINED == set()
    for code, cause in CAUSES.items():
        assert cause_of(code) is cause
        assert remedy_of(Notice(code=code, text="anything")) == cause.remedy


@pytest.mark.parametrize("code", ["", "OfALaterRelease", *sorted(UNEXPLAINED)])
def test_the_log_is_the_remedy_for_a_cause_that_is_not_known(code: str) -> None:
    """An older backend sends no code; for a rejected container the message is the remedy."""
    assert (LOG in cause_of(code).remedy, cause_of(code).kernel) == (True, False)
    assert cause_of(code, REFUSED).remedy == REFUSED


def test_remedies_do_not_depend_on_texts() -> None:
    """The remedy of a problem without a code does not depend on its message."""
    texts = ("no cgroup has the CPUs 4-5, since a partition did not end", "boot Linux 6.7", "Permission denied", "x")
    assert len({remedy_of(Notice(code=StatusCode.BACKEND_PROBLEM, text=text)) for text in texts}) == 1


def test_only_a_limit_of_the_kernel_is_not_a_fault_of_the_pod() -> None:
    """The doctor reports such a cause as a note, unless the configuration requires partitions."""
    kernel = {code for code, cause in CAUSES.items() if cause.kernel}
    assert kernel == {BackendCode.KERNEL_TOO_OLD, BackendCode.NODE_IS_CONTAINER}


def test_no_code_of_the_backend_is_one_of_the_service() -> None:
    """``/v1/status`` shows both in one field."""
    assert set(map(str, BackendCode)).isdisjoint(map(str, StatusCode))
