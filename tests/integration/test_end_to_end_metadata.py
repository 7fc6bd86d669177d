# SPDX-License-Identifier: Apache-2.0
"""Device metadata (KEP-5304) from the claim to the container, with all stand-ins."""

import json
from pathlib import Path

from tests.stage.pods import Box, claim_pod, cpus, hugepages
from tests.stage.process import wait_for
from tests.stage.stage import Stage

MOUNTS = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims"


def source(box: Box, place: str) -> Path:
    """The host's file that the container sees at a place below the mounts."""
    return box.mounts[f"{MOUNTS}/{place}"]


def test_a_container_reads_of_its_devices_and_only_of_its_own(stage: Stage) -> None:
    """One file for each request and driver, at the path that the KEP names; gone with the claim."""
    with claim_pod(stage, "db", cpus(4), hugepages(4 << 20)) as pod:
        pod.prepare()
        box = pod.run()
        told = json.loads(source(box, "db-claim/cpus/dra.cpu-metadata.json").read_text())
        assert told["metadata"]["uid"] == pod.claim_uid
        attributes = told["requests"][0]["devices"][0]["attributes"]
        assert attributes["dra.cpu/allocatedNumCPUs"] == {"int": 4}
        pages = json.loads(source(box, "db-claim/pages/dra.memory-metadata.json").read_text())
        assert pages["requests"][0]["devices"][0]["attributes"]["dra.memory/allocatedBytes"] == {"int": 4 << 20}
        assert set(pod.create("other", cdi_devices=[]).mounts) == set()
        file = source(box, "db-claim/cpus/dra.cpu-metadata.json")
    assert not file.parent.parent.exists()


def test_a_restart_finds_its_file_after_somebody_removed_it(stage: Stage) -> None:
    """A mount without a source would keep the container from starting: the file comes back by itself."""
    with claim_pod(stage, "db", cpus(2)) as pod:
        pod.prepare()
        box = pod.run()
        file = source(box, "db-claim/cpus/dra.cpu-metadata.json")
        content = file.read_text()
        file.unlink()
        wait_for("the metadata file", file.exists, 5)
        box.stop()
        again = pod.run()
        assert source(again, "db-claim/cpus/dra.cpu-metadata.json").read_text() == content
