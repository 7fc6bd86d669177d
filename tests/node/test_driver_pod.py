# SPDX-License-Identifier: Apache-2.0
"""The driver's running containers agree with the rendered chart, according to the kernel's files and the runtime.

The rig translates the rendered DaemonSet into calls to the runtime (kubelet_pod.py). The expected values are read from
the DaemonSet itself, so the tests also detect errors in that translation.
"""

import json
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from tests.node._pb import cri_pb2 as pb
from tests.node.rig import kernel
from tests.node.rig.cluster import NODE_NAME, Cluster
from tests.node.rig.driver_pod import DriverContainer, DriverPod
from tests.node.rig.kernel import Cgroup
from tests.node.rig.kubelet_pod import MASKED_PATHS, READONLY_PATHS
from tests.node.rig.kubelet_resources import quantity

pytestmark = pytest.mark.core
POD_NETWORK = ip_network("10.244.0.0/24")  # guest/etc/cni/net.d
# The capabilities in linux/capability.h, ordered by their numbers and starting with 0.
CAPABILITIES = """
CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
""".split()  # noqa: SIM905  a list of so many strings is harder to compare with the header
# Mounts that the runtime and the kubelet add to the pod's volumes.
RUNTIME_MOUNTS = {
    *("/", "/proc", "/dev", "/dev/pts", "/dev/mqueue", "/dev/shm", "/sys", "/sys/fs/cgroup"),
    *("/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/dev/termination-log"),
    *(*MASKED_PATHS, *READONLY_PATHS),
}
RUNTIME_VARIABLES = {"PATH", "HOME", "LANG", "HOSTNAME", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}
RUNTIME_VARIABLES |= {"MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "PYTHONTZPATH"}


@pytest.fixture
def pod(cluster: Cluster) -> DriverPod:
    """Returns the driver's pod."""
    return cluster.instance.pod


@pytest.fixture
def spec(cluster: Cluster) -> dict[str, Any]:
    """Returns the pod's spec as rendered."""
    (daemonset,) = (one for one in cluster.objects if one["kind"] == "DaemonSet")
    found: dict[str, Any] = daemonset["spec"]["template"]["spec"]
    return found


def each(pod: DriverPod, spec: dict[str, Any]) -> list[tuple[DriverContainer, dict[str, Any]]]:
    """Returns each running container with its rendered spec, and asserts that none is missing or unexpected."""
    assert [*pod.containers] == [one["name"] for one in spec["containers"]]
    return [(pod.containers[one["name"]], one) for one in spec["containers"]]


def mounts_of(container: DriverContainer) -> dict[str, tuple[set[str], list[str]]]:
    """Returns the topmost mount at each mount point: its options, and its propagation tags."""
    found = {}
    for line in Path(f"/proc/{container.pid}/mountinfo").read_text().splitlines():
        words = line.split()
        found[words[4]] = (set(words[5].split(",")), words[6 : words.index("-")])
    return found


def resolved(path: str) -> str:
    """Resolves the only symbolic link in the images that leads to a directory with mounts under it."""
    return path.replace("/var/run/", "/run/", 1) if path.startswith("/var/run/") else path


def runtime_spec(pod: DriverPod, container: DriverContainer) -> dict[str, Any]:
    """Returns the OCI configuration that containerd has created."""
    answer = pod.node.runtime.call(pb.ContainerStatusRequest(container_id=container.id, verbose=True))
    found: dict[str, Any] = json.loads(answer.info["info"])["runtimeSpec"]
    return found


def test_privileges_match_the_chart(pod: DriverPod, spec: dict[str, Any]) -> None:
    """Capabilities, user, no_new_privs and the seccomp filter are exactly those of the security contexts."""
    whole = spec["securityContext"]
    for container, wanted in each(pod, spec):
        own = wanted["securityContext"]
        assert own["capabilities"]["drop"] == ["ALL"]
        added = own["capabilities"].get("add", [])
        mask = sum(1 << CAPABILITIES.index(name) for name in added)
        assert {int(container.status(name), 16) for name in ("CapPrm", "CapBnd")} == {mask}
        # The backend lowers SYS_ADMIN and raises it only in the thread that writes a partition file.
        lowered = sum(1 << CAPABILITIES.index(name) for name in added if name == "SYS_ADMIN")
        assert int(container.status("CapEff"), 16) == mask & ~lowered
        assert {container.status("CapInh"), container.status("CapAmb")} == {f"{0:016x}"}
        assert container.status("NoNewPrivs") == str(int(not own["allowPrivilegeEscalation"]))
        assert (
            container.status("Seccomp") == {"RuntimeDefault": "2", "Unconfined": "0"}[whole["seccompProfile"]["type"]]
        )
        assert set(container.status("Uid").split()) == {str(whole["runAsUser"])}
        assert set(container.status("Gid").split()) == {str(whole["runAsGroup"])}


def test_mounts_match_the_chart(pod: DriverPod, spec: dict[str, Any]) -> None:
    """Each volume is at its path, writable or read-only as rendered, without propagation; nothing else from the node is
    mounted.
    """
    host = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    for container, wanted in each(pod, spec):
        found = mounts_of(container)
        assert ("ro" in found["/"][0]) == wanted["securityContext"]["readOnlyRootFilesystem"]
        places = {resolved(one["mountPath"]): one for one in wanted["volumeMounts"]}
        for place, mount in places.items():
            options, tags = found[place]
            assert ("ro" in options) == mount.get("readOnly", False), place
            assert "mountPropagation" not in mount
            assert [tag for tag in tags if not tag.startswith("unbindable")] == [], f"{place} is private"
            if mount["name"] in host:
                assert Path(f"/proc/{container.pid}/root{place}").samefile(host[mount["name"]]), place
        below = tuple(f"{place}/" for place in places)
        strange = {
            one for one in found if one not in places and one not in RUNTIME_MOUNTS and not one.startswith(below)
        }
        assert {one for one in strange if not one.endswith("/thermal_throttle")} == set()


def test_commands_and_environments_match_the_chart(pod: DriverPod, spec: dict[str, Any]) -> None:
    """The arguments follow the image's entry point, and the downward API has filled in the pod's own values."""
    fields = {"spec.nodeName": NODE_NAME, "metadata.uid": pod.uid}
    for container, wanted in each(pod, spec):
        words = Path(f"/proc/{container.pid}/cmdline").read_text().rstrip("\0").split("\0")
        assert words[-len(wanted["args"]) :] == wanted["args"]
        variables = dict(entry.split("=", 1) for entry in kernel.environment(container.pid) if entry)
        rendered = {
            one["name"]: one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]] for one in wanted["env"]
        }
        assert variables.items() >= rendered.items()
        others = {name for name in variables.keys() - rendered.keys() if not name.startswith("KUBERNETES_")}
        assert others <= RUNTIME_VARIABLES


def test_namespaces_are_those_of_an_ordinary_pod(pod: DriverPod, spec: dict[str, Any]) -> None:
    """Each container has its own cgroup, mount and PID namespaces; both share the pod's network namespace, not the
    node's.
    """

    def inode(pid: int, kind: str) -> str:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())

    frontend, backend = pod.frontend.pid, pod.backend.pid
    for kind in ("cgroup", "mnt", "pid"):
        assert len({inode(pid, kind) for pid in (1, frontend, backend)}) == 3, kind
    for kind in ("net", "ipc", "uts"):
        assert inode(frontend, kind) == inode(backend, kind) != inode(1, kind), kind
    assert inode(frontend, "user") == inode(1, "user")
    assert not spec.get("hostNetwork", False)
    assert ip_address(pod.address) in POD_NETWORK
    for container in pod.containers.values():
        assert container.status("NSpid").split()[1:] == ["1"]


def test_limits_match_the_chart(pod: DriverPod, spec: dict[str, Any]) -> None:
    """The memory limit, the CPU weight and the OOM score are those that a kubelet computes from the rendered resources
    and priority.
    """
    total = sum(quantity(one["resources"]["limits"]["memory"]) for one in spec["containers"])
    shares = {one["name"]: int(quantity(one["resources"]["requests"]["cpu"]) * 1024) for one in spec["containers"]}
    for container, wanted in each(pod, spec):
        group = kernel.cgroup_of(container.pid)
        assert group.read("memory.max") == str(quantity(wanted["resources"]["limits"]["memory"]))
        assert group.read("memory.swap.max") == "0"
        assert group.read("memory.oom.group") == "1"
        assert "cpu" not in wanted["resources"]["limits"]
        assert group.read("cpu.max").startswith("max ")
        assert runtime_spec(pod, container)["linux"]["resources"]["cpu"]["shares"] == shares[container.name]
        assert spec["priorityClassName"] == "system-node-critical"
        assert Path(f"/proc/{container.pid}/oom_score_adj").read_text().strip() == "-997"
        assert group.parent == Cgroup(pod.config.linux.cgroup_parent)
        assert group.parent.read("memory.max") == str(total)
        assert "burstable" in group.path


def test_the_runtime_masks_the_paths_that_a_kubelet_masks(pod: DriverPod) -> None:
    """Masked and read-only paths and the seccomp filter are in the configuration that containerd gave to runc."""
    for container in pod.containers.values():
        linux = runtime_spec(pod, container)["linux"]
        assert set(linux["maskedPaths"]) >= set(MASKED_PATHS)
        assert set(linux["readonlyPaths"]) >= set(READONLY_PATHS)
        assert linux["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
        assert {"type": "cgroup"} in linux["namespaces"]


def test_every_probe_is_answered_at_the_pods_address(pod: DriverPod, spec: dict[str, Any]) -> None:
    """Startup, liveness and readiness probes of both containers succeed when run as a kubelet runs them."""
    for container, wanted in each(pod, spec):
        kinds = [kind for kind in ("startup", "liveness", "readiness") if f"{kind}Probe" in wanted]
        assert kinds == ["startup", "liveness", "readiness"]
        ports = {one["name"]: one["containerPort"] for one in wanted["ports"]}
        for kind in kinds:
            probe = wanted[f"{kind}Probe"]
            plan = container.plan.probes[kind]
            assert (plan.path, plan.port) == (probe["httpGet"]["path"], ports[probe["httpGet"]["port"]])
            assert container.probe(kind) == ""


def test_a_restart_is_a_new_container_in_the_same_sandbox(cluster: Cluster, pod: DriverPod) -> None:
    """A container that dies comes back with attempt 1, while the other one keeps running."""
    before, other, attempt = pod.backend.id, pod.frontend.pid, pod.backend.attempt
    cluster.instance.kill_backend()
    cluster.wait_ready()
    assert pod.backend.id != before
    assert pod.node.runtime.state(pod.backend.id).metadata.attempt == attempt + 1
    assert pod.frontend.pid == other
