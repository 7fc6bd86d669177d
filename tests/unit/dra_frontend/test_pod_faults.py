# SPDX-License-Identifier: Apache-2.0
"""The service and the commands in the pod report the pod's faults, such as a missing token, in the same way."""

from dataclasses import replace

import pytest
from dra_frontend.pod_faults import own_faults, visible_faults
from dra_frontend.settings import Settings
from numa_contract.config import Config
from numa_tools.doctor.checks.driver import CHECKS
from numa_tools.doctor.facts import PodFault
from numa_tools.doctor.gather import _read_pod

IN_POD = Settings(Config(), "n", "p", "/", None, in_pod=True)
TOKEN = "the API server cannot be queried: read the pod's service account: "


def is_missed(faults: list[str]) -> bool:
    """Returns True if the pod's token is reported as missing."""
    return any(one.startswith(TOKEN) for one in faults)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the environment variable that would show this process that it is running in a pod."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def test_commands_in_the_pod_report_a_missing_token_as_the_service_does() -> None:
    """The doctor's finding contains the same sentence and a remedy."""
    assert is_missed([str(one) for one in own_faults(IN_POD)])
    assert [*map(str, visible_faults(IN_POD))] == [*map(str, own_faults(IN_POD))]
    (fault,) = (one for one in _read_pod(IN_POD) if one.what.startswith(TOKEN))
    assert "(the chart's token volume)" in fault.what
    assert fault.fatal
    check = next(one for one in CHECKS if one.id == "driver.pod")
    (finding,) = check.judge((PodFault(fault.what, fault.remedy, fault.fatal),))
    assert (finding.what.startswith("The API server cannot be queried"), bool(finding.remedy)) == (True, True)


@pytest.mark.parametrize("elsewhere", [replace(IN_POD, host_root="/host"), replace(IN_POD, in_pod=False)])
def test_commands_elsewhere_do_not_require_the_drivers_token(elsewhere: Settings) -> None:
    """In a debugging pod or directly on the node, the command has a different token or none. Only the service requires
    one.
    """
    assert not is_missed([str(one) for one in visible_faults(elsewhere)])
    assert is_missed([str(one) for one in own_faults(elsewhere)])


def test_a_kubeconfig_that_cannot_be_read_is_reported_everywhere() -> None:
    """The kubeconfig is part of the configuration, not of the pod."""
    settings = replace(IN_POD, config=Config(kubeconfig="/no/such/file"), in_pod=False, host_root="/host")
    for faults in (own_faults(settings), visible_faults(settings)):
        (text,) = (str(one) for one in faults if "the API server cannot be queried" in one.problem)
        assert text.endswith("the file does not exist; correct the file, or kubeconfig")
