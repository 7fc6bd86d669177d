# SPDX-License-Identifier: Apache-2.0
"""Each remedy belongs to a code, which is either one of the service's codes or the code of a cause that the backend
reports.
"""

import pytest
from numa_contract.backend_codes import BackendCode
from numa_contract.state.status import Notice, StatusCode
from numa_tools.causes import _REMEDIES, CAUSES, COVERED_BY_CHECKS, REFUSED_REMEDY, WITHOUT_REMEDY, cause_of, remedy_of

LOG = "kubectl logs POD -c backend"


def test_each_service_code_has_a_remedy_or_a_check_of_its_own() -> None:
    """A new service code requires a row in the table of remedies, unless a check explains the problem. If the
    problem has a backend code, its remedy comes from the table of causes.
    """
    others = {StatusCode.SERVICE_DOWN, StatusCode.FILE_MISSING}
    assert others.isdisjoint({*_REMEDIES} | COVERED_BY_CHECKS), "only the command status reports these"
    assert {*_REMEDIES} | COVERED_BY_CHECKS | others | {StatusCode.BACKEND_PROBLEM} == {*StatusCode}
    assert {*_REMEDIES} & COVERED_BY_CHECKS == set()
    for code, remedy in _REMEDIES.items():
        assert remedy_of(Notice(code=code, text="anything")) == remedy
    assert "kubectl logs POD -c frontend" in remedy_of(Notice(code="OfALaterRelease", text="anything"))


def test_the_remedy_for_a_missing_registration_names_the_setting() -> None:
    """If the sockets are in a directory that the kubelet does not read, they still exist, so kubelet.registration has
    no finding.
    """
    assert "kubeletRootDir" in remedy_of(Notice(code=StatusCode.NOT_REGISTERED, text="anything"))


def test_each_backend_code_has_a_remedy_or_is_known_to_have_none() -> None:
    """A new backend code requires a row in the table of causes, unless it is listed as unexplained."""
    assert {*CAUSES} | WITHOUT_REMEDY == {*BackendCode}
    assert CAUSES.keys() & WITHOUT_REMEDY == set()
    for code, cause in CAUSES.items():
        assert cause_of(code) is cause
        assert remedy_of(Notice(code=code, text="anything")) == cause.remedy


@pytest.mark.parametrize("code", ["", "OfALaterRelease", *sorted(WITHOUT_REMEDY)])
def test_the_log_is_the_remedy_for_an_unknown_cause(code: str) -> None:
    """An older backend sends no code. For a rejected container, the remedy is to fix the cause given in the message."""
    assert (LOG in cause_of(code).remedy, cause_of(code).kernel) == (True, False)
    assert cause_of(code, REFUSED_REMEDY).remedy == REFUSED_REMEDY


def test_remedies_do_not_depend_on_messages() -> None:
    """The remedy for a problem without a code is the same whatever its message."""
    texts = ("no cgroup has the CPUs 4-5, since a partition did not end", "boot Linux 6.7", "Permission denied", "x")
    assert len({remedy_of(Notice(code=StatusCode.BACKEND_PROBLEM, text=text)) for text in texts}) == 1


def test_only_an_old_kernel_and_a_containerized_node_are_kernel_limitations() -> None:
    """The doctor reports a kernel limitation as a note, unless the configuration requires partitions."""
    kernel = {code for code, cause in CAUSES.items() if cause.kernel}
    assert kernel == {BackendCode.KERNEL_TOO_OLD, BackendCode.NODE_IS_CONTAINER}


def test_no_backend_code_equals_a_service_code() -> None:
    """``/v1/status`` shows both kinds of codes in the same field."""
    assert set(map(str, BackendCode)).isdisjoint(map(str, StatusCode))
