# SPDX-License-Identifier: Apache-2.0
"""The contents of the two images, as seen from the running containers of the chart's pod."""

import re
from pathlib import Path

from tests.node.rig import figures
from tests.node.rig.cluster import Cluster
from tests.node.rig.driver_pod import DriverContainer

SOURCE = Path("/opt/numa/src")
SERVICES = {"frontend": "dra-frontend", "backend": "nri-backend"}


def root_of(container: DriverContainer) -> Path:
    """Returns the container's root directory."""
    return Path(f"/proc/{container.pid}/root")


def test_the_images_contain_this_source_and_no_tools(cluster: Cluster) -> None:
    """The images contain this tree's source and its bytecode, but no shell, pip or package manager."""
    for name, container in cluster.instance.pod.containers.items():
        root = root_of(container)
        (packages,) = root.glob("opt/app/lib/python3*/site-packages")
        for source in (SOURCE / "shared/src", SOURCE / "services" / SERVICES[name] / "src"):
            for file in source.rglob("*.py"):
                inside = packages / file.relative_to(source)
                assert inside.read_bytes() == file.read_bytes()
                assert list(inside.parent.glob(f"__pycache__/{inside.stem}.cpython-*.pyc"))
        tools = ("sh", "bash", "dash", "busybox", "pip", "pip3", "apt-get", "dpkg", "gcc", "perl")
        assert [tool for tool in tools for place in ("usr/bin", "opt/app/bin") if (root / place / tool).exists()] == []
        assert not list(packages.glob("pip*"))
        assert not (root / "etc/pip.conf").exists()
        assert not (root / "etc/apt").exists()


def test_every_debian_package_has_its_licence(cluster: Cluster) -> None:
    """Each package in dpkg's database has a readable copyright file, possibly through a link to another package."""
    for container in cluster.instance.pod.containers.values():
        root = root_of(container)
        status = (root / "var/lib/dpkg/status").read_text()
        packages = re.findall(r"^Package: (.+)$", status, re.MULTILINE)
        assert {"libc6", "libgcc-s1", "libstdc++6"} <= set(packages)
        assert [name for name in packages if not (root / "usr/share/doc" / name / "copyright").is_file()] == []


def test_the_containers_exit_cleanly(cluster: Cluster) -> None:
    """Each container exits with status 0 on SIGTERM, even though its process is the first one in the container."""
    for container in cluster.instance.pod.containers.values():
        sizes = ", ".join(f"{name} {container.mebibytes(name):.1f} MiB" for name in ("Rss", "Pss"))
        figures.note(f"{container.name} container: memory", sizes)
        assert container.stop() == 0
