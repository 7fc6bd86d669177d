# SPDX-License-Identifier: Apache-2.0
"""Both services with all stand-ins: what memory parameters of a claim become."""

import pytest

from tests.stage.pods import claim_pod, cpus, hugepages, memory, opaque
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

MIB = 1 << 20


def test_a_claim_brings_its_hugepages_as_a_file_system(stage: Stage) -> None:
    """The runtime is told to mount it, by the CDI file alone; a restarted container has it again, others never."""
    config = [opaque("dra.memory", "memoryConfig", {"mount": {"path": "/dev/hugepages", "mode": "1777"}}, "pages")]
    with claim_pod(stage, "dpdk", memory(64 * MIB), hugepages(4 * MIB), config=config) as pod:
        pod.prepare()
        mount = {
            "destination": "/dev/hugepages",
            "type": "hugetlbfs",
            "source": "none",
            "options": ["nosuid", "nodev", "pagesize=2M", f"size={4 * MIB}", "mode=1777"],
        }
        for _ in range(2):
            box = pod.run()
            # Beside it the files of the device metadata are mounted.
            assert [one for one in box.described["mounts"] if one["type"] != "bind"] == [mount]
            box.stop()
        assert pod.create("log", cdi_devices=[]).described["mounts"] == []


def test_drivers_that_are_told_different_things_both_refuse(stage: Stage) -> None:
    """Nothing of the claim is given, and the reason reaches the kubelet."""
    config = [
        opaque("dra.cpu", "cpuConfig", {"sharing": "pod"}),
        opaque("dra.memory", "memoryConfig", {"sharing": "container"}),
    ]
    with claim_pod(stage, "torn", cpus(1), memory(64 * MIB), config=config) as pod:
        with pytest.raises(AnsweredError, match="sharing: holds for the whole claim, but its requests differ"):
            pod.prepare()
        assert stage.state("/v1/claims") == []
