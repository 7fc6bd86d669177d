# SPDX-License-Identifier: Apache-2.0
"""Any directory or mount of the frontend that is missing or unusable is reported with a remedy."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from dra_frontend.node.preflight import PreflightFault, check_pod, needed_directories
from numa_contract.config import Config, parse_config
from numa_node.mounts import Mount, parse_mounts

_NOBODY = 65534
CONTAINER = "500 400 0:50 / / ro,relatime - overlay overlay rw,lowerdir=/a\n"
CGROUP = "501 500 0:26 / {} ro,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
VOLUMES = [one.volume for one in needed_directories(Config())]


@pytest.fixture
def base() -> Iterator[Path]:
    """Returns a directory that every user can enter, since pytest's own directories are accessible only to their
    owner.
    """
    with TemporaryDirectory(prefix="dn-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def config(base: Path) -> Config:
    """Returns a configuration whose directories all exist on one file system, as the kubelet creates them for the
    chart.
    """
    keys = {"runDir": "run", "cdiDir": "cdi", "kubeletRootDir": "kubelet", "cgroupRoot": "cgroup"}
    found = parse_config({key: str(base / name) for key, name in keys.items()}, "test")
    for needed in needed_directories(found):
        Path(needed.path).mkdir(parents=True)
    return found


def mounted(config: Config, *, without: str = "", root: str = "/{}") -> tuple[Mount, ...]:
    """Returns the mounts in the chart's container, except those from the given volume."""
    lines = [CONTAINER, CGROUP.format(config.cgroup_root)]
    for number, needed in enumerate(needed_directories(config)):
        if needed.volume != without:
            part = root.format(needed.volume)
            lines.append(f"{600 + number} 500 8:1 {part} {needed.path} rw,relatime - ext4 /dev/vda1 rw\n")
    return parse_mounts("".join(lines))


def faults(config: Config, **more: str) -> list[PreflightFault]:
    """Returns the faults found in a container."""
    return check_pod(config, contained=True, mounts=mounted(config, **more))


def test_a_pod_as_the_chart_renders_it_has_no_faults(config: Config) -> None:
    """A process that is not in a container has no mounts of its own. No faults are reported for such a process either,
    even if the directories do not exist yet.
    """
    assert faults(config) == []
    shutil.rmtree(config.run_dir)
    assert check_pod(config, contained=False, mounts=()) == []


@pytest.mark.parametrize("volume", VOLUMES)
def test_each_volume_that_is_not_mounted_is_named(volume: str, config: Config) -> None:
    """The volume is reported even if the container's own file system is writable, because no other process on the node
    would see the files.
    """
    needed = next(one for one in needed_directories(config) if one.volume == volume)
    (fault,) = faults(config, without=volume)
    assert fault.problem.startswith(f"{needed.name} {needed.path} is not mounted from the node")
    assert f"{volume} volume)" in fault.remedy
    assert f"correct {needed.setting}" in fault.remedy


def test_an_emptydir_in_place_of_a_directory_is_named(config: Config) -> None:
    """The emptyDir is writable, but neither the runtime nor the kubelet uses it."""
    found = faults(config, root="/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/{}")
    expected = " is one of the pod's emptyDir volumes"
    assert [one.problem.rpartition(expected)[1] for one in found] == [expected] * len(VOLUMES)


@pytest.mark.parametrize("volume", VOLUMES)
def test_a_file_in_place_of_a_directory_is_reported(volume: str, config: Config) -> None:
    """The file may take the place of the directory itself, or of a parent directory that does not exist yet."""
    needed = next(one for one in needed_directories(config) if one.volume == volume)
    shutil.rmtree(needed.path)
    Path(needed.path).write_text("")
    (fault,) = faults(config)
    assert fault.problem == f"{needed.name} {needed.path} is not a directory"


def in_child(work: Callable[[], list[PreflightFault]]) -> list[str]:
    """Calls the function in a child process that lacks the capability to override file permissions."""
    if os.geteuid() != 0:
        return list(map(str, work()))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            os.write(writing, json.dumps(list(map(str, work()))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return list(json.loads(data))


@pytest.mark.parametrize("volume", VOLUMES)
def test_a_directory_without_write_permission_is_named(volume: str, config: Config) -> None:
    """The check uses access(2), so owner, mode, capabilities and security modules are all taken into account."""
    for needed in needed_directories(config):
        Path(needed.path).chmod(0o500 if needed.volume == volume else 0o777)
    (text,) = in_child(lambda: faults(config))
    needed = next(one for one in needed_directories(config) if one.volume == volume)
    assert text.startswith(f"{needed.name} {needed.path} cannot be written by uid ")
    assert "runAsUser: 0" in text
    Path(needed.path).chmod(0o700)


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$2" -c "$3"
"""
CHECK = """
from dra_frontend.node.preflight import check_pod
from numa_contract.config import parse_config
for one in check_pod(parse_config({}, "test"), contained=False, mounts=()):
    print(one)
"""


@pytest.mark.parametrize("volume", VOLUMES)
def test_a_directory_that_is_mounted_read_only_is_named(volume: str, config: Config, base: Path) -> None:
    """The test mounts the directory for real, in a separate mount namespace."""
    needed = next(one for one in needed_directories(config) if one.volume == volume)
    keys = {"runDir": "run", "cdiDir": "cdi", "kubeletRootDir": "kubelet"}
    script = CHECK.format({key: str(base / name) for key, name in keys.items()})
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh", needed.path]
    done = subprocess.run([*command, sys.executable, script], capture_output=True, text=True, check=False)
    if done.returncode:
        # Some kernels deny user namespaces to ordinary users. As root, and therefore in CI, the mount always succeeds.
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    (text,) = done.stdout.splitlines()
    assert text.startswith(f"{needed.name} {needed.path} is mounted read-only; mount the node's {needed.path} there")


def test_an_optional_directory_causes_only_a_warning(config: Config) -> None:
    """Covers a backend lock directory that the container can see, and a cgroup directory that is not a cgroup tree."""
    Path(config.run_dir, "backend").mkdir()
    Path(config.run_dir, "backend/active.lock").write_text("")
    foreign = [one for one in mounted(config) if one.kind != "cgroup2"]
    foreign += parse_mounts(f"501 500 0:27 / {config.cgroup_root} rw - tmpfs tmpfs rw\n")
    found = check_pod(config, contained=True, mounts=tuple(foreign))
    assert [one.fatal for one in found] == [False, False]
    assert "'hidden' volume" in found[0].remedy
    assert "of type tmpfs instead of the node's cgroup2 tree" in found[1].problem
    assert "hostHugepages.detect: true" in found[1].remedy
