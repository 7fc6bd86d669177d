# SPDX-License-Identifier: Apache-2.0
"""The two images on a real containerd: the chart's pod, with its mounts and rights, does what the processes do."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.waiting import PATIENCE
from tests.node import test_claims as claims
from tests.node import test_hostile as hostile
from tests.node.rig import figures
from tests.node.rig.cluster import Cluster
from tests.node.rig.driver_pod import DriverContainer
from tests.node.rig.image_cluster import ImageCluster
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages

if TYPE_CHECKING:
    from tests.node.conftest import RunningCluster

# The first test imports the images, whose 9,000 files are unpacked by an emulated processor.
pytestmark = [pytest.mark.images, pytest.mark.timeout(600 * PATIENCE)]
MIB = 1 << 20
SOURCE = Path("/opt/numa/src")
CAP_DAC_OVERRIDE = 1  # linux/capability.h
RULES = [
    claims.test_a_claim_becomes_a_container_on_one_numa_node,
    claims.test_others_make_way_before_the_first_instruction,
    claims.test_a_restarted_container_finds_everything_as_it_was,
    claims.test_nobody_else_gets_into_a_claim,
    claims.test_every_free_cpu_can_be_claimed,
    hostile.test_who_hides_his_own_cgroup_files_is_seen_and_moved,
]


@pytest.fixture(scope="module", autouse=True)
def end_of_the_pod(running_cluster: "RunningCluster") -> Iterator[None]:
    """The pod leaves with this module: what follows may restart the runtime."""
    yield
    running_cluster.end()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.__name__).removeprefix("test_"))
def test_what_holds_with_processes_holds_with_images(cluster: Cluster, rule: Callable[[Cluster], None]) -> None:
    """Every rule of test_claims.py, with both services as containers of one pod."""
    rule(cluster)


def test_the_pod_has_no_more_rights_than_the_chart_says(cluster: ImageCluster) -> None:
    """The backend's one capability, none to be gained, a system call filter, and a root that cannot be written."""
    for container, capabilities in ((cluster.driver.frontend, 0), (cluster.driver.backend, 1 << CAP_DAC_OVERRIDE)):
        assert {int(container.status(name), 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {capabilities}
        assert container.status("NoNewPrivs") == "1"
        assert container.status("Seccomp") == "2"
        mounts = Path(f"/proc/{container.pid}/mountinfo").read_text().splitlines()
        (root,) = (line.split() for line in mounts if line.split()[4] == "/")
        assert "ro" in root[5].split(",")


def test_the_images_hold_this_source_and_nothing_to_work_with(cluster: ImageCluster) -> None:
    """What runs is what is tested elsewhere, with its byte code; there is no shell, no pip, no package manager."""
    for container, service in (
        (cluster.driver.frontend, "dra-frontend"),
        (cluster.driver.backend, "nri-backend"),
    ):
        root = Path(f"/proc/{container.pid}/root")
        (packages,) = root.glob("opt/app/lib/python3*/site-packages")
        for source in (SOURCE / "shared/src", SOURCE / "services" / service / "src"):
            for file in source.rglob("*.py"):
                inside = packages / file.relative_to(source)
                assert inside.read_bytes() == file.read_bytes()
                assert list(inside.parent.glob(f"__pycache__/{inside.stem}.cpython-*.pyc"))
        tools = ("sh", "bash", "dash", "busybox", "pip", "pip3", "apt-get", "dpkg", "gcc", "perl")
        assert [name for name in tools for place in ("usr/bin", "opt/app/bin") if (root / place / name).exists()] == []
        assert not list(packages.glob("pip*"))
        assert not (root / "etc/pip.conf").exists()
        assert not (root / "etc/apt").exists()


def test_every_debian_package_has_its_licence(cluster: ImageCluster) -> None:
    """What dpkg's database names has a copyright file that can be read, though some are links into another package."""
    for container in (cluster.driver.frontend, cluster.driver.backend):
        root = Path(f"/proc/{container.pid}/root")
        status = (root / "var/lib/dpkg/status").read_text()
        packages = re.findall(r"^Package: (.+)$", status, re.MULTILINE)
        assert {"libc6", "libgcc-s1", "libstdc++6"} <= set(packages)
        assert [name for name in packages if not (root / "usr/share/doc" / name / "copyright").is_file()] == []


def test_a_killed_container_is_ready_again(cluster: ImageCluster) -> None:
    """What the kubelet starts again knows the claims: the container keeps its CPUs and pages, others stay away."""
    plain = cluster.node.pod("web").run()
    db = cluster.pod(cpus(2, numa_node=1), hugepages(4 * MIB))
    box = db.run()
    frontend = cluster.driver.frontend
    for container, kill in ((cluster.driver.backend, cluster.instance.kill_backend), (frontend, frontend.kill)):
        kill()
        began = time.monotonic()
        container.start()
        cluster.wait_ready()
        figures.note(f"{container.name} container: start until ready", f"{time.monotonic() - began:.1f} s")
        _note_memory(container)
    assert box.cpus_allowed == db.cpus
    assert box.cgroup.hugetlb("2MB")["max"] == str(4 * MIB)
    until(lambda: not plain.cpus_allowed & db.cpus, "the plain container stays away")
    assert cluster.instance.held() == {db.claim_uid: db.cpus}


def _note_memory(container: DriverContainer) -> None:
    sizes = ", ".join(f"{name} {container.mebibytes(name):.1f} MiB" for name in ("Rss", "Pss"))
    figures.note(f"{container.name} container: memory", sizes)


def test_a_container_leaves_in_order(cluster: ImageCluster) -> None:
    """SIGTERM ends both with status 0, though they are the first process of their container."""
    assert cluster.driver.backend.stop() == 0
    assert cluster.driver.frontend.stop() == 0
