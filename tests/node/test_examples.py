# SPDX-License-Identifier: Apache-2.0
"""Every manifest in examples/ runs on a node with the driver as the chart installs it, and gets the resources that it
requests.

Each container's resources are read from the kernel, inside and outside the container, and compared with its claim's
record.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from numa_contract.records import AllocationRecord, parse_record

from tests.fakes.waiting import PATIENCE
from tests.node.rig import kernel
from tests.node.rig.cluster import NODE_NAME, Cluster
from tests.node.rig.foreign_driver import class_document, registered, slice_document
from tests.node.rig.kernel import CGROUPS, Cgroup
from tests.node.rig.manifests import Document, ManifestPod, pod_templates, read_manifest
from tests.node.rig.pods import Container
from tests.node.rig.wait import until

EXAMPLES = Path("/opt/numa/src/examples")
INDIVIDUAL = {"cpuDeviceMode": "individual"}
SETTINGS: dict[str, dict[str, Any]] = {
    "slurm-bridge": INDIVIDUAL,
    "extended-resource": INDIVIDUAL,
    "named-cpus": {"allocator": "external"},
}
"""The driverConfig that an example needs, as its first lines state."""
VALUES: dict[str, dict[str, Any]] = {"extended-resource": {"deviceClasses": {"extendedResource": "dra-numa/cpu"}}}
"""Other chart values that an example needs, as its first lines state."""
FOREIGN = {"gpu.nvidia.com": ("resource.kubernetes.io/numaNode", 0), "dra.net": ("dra.net/numaNode", 1)}
"""Other drivers' devices: by driver, the attribute that contains the device's NUMA node, and the number of that node.
The GPU is on node 0, since its example claims eight CPUs, and the driver withholds one of node 1's eight CPUs from
claims.
"""
MODES: dict[str, dict[str, Any]] = {"auto": {}, "pool": {"cpuExclusivity": "pool"}, "without SYS_ADMIN": {}}
LACKING = {"without SYS_ADMIN": "backend capability SYS_ADMIN"}
PATHS = sorted(EXAMPLES.glob("**/[a-z]*.yaml")) if EXAMPLES.is_dir() else []
NAMES = [path.stem for path in PATHS if path.parent.name != "values"]
MIB = 1 << 20
PAUSE = b"/bin/busybox\0sleep\0"
"""Prefix of the pause process's command line in this machine's sandboxes (vm/images.sh)."""

pytestmark = [pytest.mark.profile("examples"), pytest.mark.timeout(600 * PATIENCE)]


def claimed_by_policy(pod: Document, template: str) -> Document:
    """Returns a Guaranteed pod as the chart's policy changes it: its first container uses a claim from the template."""
    first, *others = pod["spec"]["containers"]
    resources = {**first["resources"], "claims": [{"name": "cpus"}]}
    entry = {"name": "cpus", "resourceClaimTemplateName": template}
    containers = [{**first, "resources": resources}, *others]
    return {**pod, "spec": {**pod["spec"], "containers": containers, "resourceClaims": [entry]}}


def launcher(machine: Document) -> Document:
    """Returns the pod that KubeVirt creates for a virtual machine."""
    container = {"name": "compute", "image": "launcher", "resources": machine["spec"]["domain"]["resources"]}
    return {"metadata": machine["metadata"], "spec": {"containers": [container]}}


def pods_of(name: str, documents: list[Document]) -> list[Document]:
    """Returns the pods of an example after the admission policy that it needs has been applied."""
    pods = list(pod_templates(documents))
    if name == "claimed-by-policy":
        return [claimed_by_policy(one, "numa-cpus-4") for one in pods]
    if name == "kubevirt":
        (machine,) = (one for one in documents if one["kind"] == "VirtualMachineInstance")
        return [claimed_by_policy(launcher(machine), "numa-cpus-8")]
    return pods


def cases() -> Iterator[Any]:
    """Returns every example in every mode, marked with the driver configuration that it needs."""
    for mode, settings in MODES.items():
        for name in NAMES:
            keys = {"reservedCPUs": None, **settings, **SETTINGS.get(name, {})}
            marks = [pytest.mark.configuration(**keys), pytest.mark.values(**VALUES.get(name, {}))]
            if mode in LACKING:
                marks.append(pytest.mark.lacking(LACKING[mode]))
            yield pytest.param(name, mode, marks=marks, id=f"{mode}-{name}")


@pytest.fixture
def others(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[None]:
    """Provides a GPU and a network interface, each with its own driver."""
    near_each_other = request.node.callspec.params["name"] == "vllm"
    slices, classes = "/apis/resource.k8s.io/v1/resourceslices", "/apis/resource.k8s.io/v1/deviceclasses"
    with ExitStack() as stack:
        for driver, (attribute, numa_node) in FOREIGN.items():
            stack.enter_context(registered(driver, Path("/var/lib/kubelet")))
            for path, document in (
                (slices, slice_document(driver, NODE_NAME, attribute, 0 if near_each_other else numa_node)),
                (classes, class_document(driver)),
            ):
                cluster.api(path, "POST", document)
                stack.callback(cluster.api, f"{path}/{driver}", "DELETE")
        yield


def records_of(cluster: Cluster, pod: ManifestPod, container: Document) -> list[AllocationRecord]:
    """Returns the records of the claims that a container uses."""
    used = {one["name"] for one in (container.get("resources") or {}).get("claims") or []}
    extended = {name for name in pod.claims if name.endswith("-extended-resources")}
    uids = [claim["metadata"]["uid"] for name, claim in pod.claims.items() if name in used | extended]
    return [parse_record(record) for uid in uids for record in cluster.instance.state(f"/v1/claims/{uid}")]


def check(cluster: Cluster, pod: ManifestPod, container: Document, mode: str) -> bool:
    """Compares a container with the records of its claims; returns False if it uses none."""
    box = pod.boxes[container["name"]]
    records = records_of(cluster, pod, container)
    if not records:
        return False
    own = frozenset().union(*(record.cpus_of() for record in records))
    if own:
        check_cpus(cluster, box, records, own, mode)
    nodes = {one.numa_node for record in records for one in record.memory}
    if nodes:
        assert box.mems_allowed == nodes
        assert f"Mems_allowed_list:\t{kernel.status(box.process, 'Mems_allowed_list')}" in inside(box)
    for size, name in ((2 * MIB, "2MB"), (1024 * MIB, "1GB")):
        claimed = sum(
            one.size for record in records for one in record.memory if one.hugepages and one.page_bytes == size
        )
        if any(record.memory for record in records):
            assert {box.cgroup.hugetlb(name)[file] for file in ("max", "rsvd.max")} == {str(claimed)}
    return True


def inside(box: Container) -> str:
    """Returns the CPUs and memory nodes that the container itself reads for its first process."""
    return box.exec("grep", "_allowed_list", "/proc/1/status").out


def check_cpus(
    cluster: Cluster, box: Container, records: list[AllocationRecord], own: frozenset[int], mode: str
) -> None:
    """Checks that the container has its CPUs to itself, and that its claims are enforced as expected in this mode: by a
    partition or by the pool.
    """
    beside = any(record.pool_cpus for record in records)
    allowed = box.cpus_allowed
    assert own <= allowed if beside else own == allowed
    assert f"Cpus_allowed_list:\t{kernel.status(box.process, 'Cpus_allowed_list')}" in inside(box)
    # A partition belongs to a single container, so claims that the containers of a pod share are enforced without one.
    by_kernel = mode == "auto" and not beside and all(record.sharing == "container" for record in records)
    assert box.partition == ("root" if by_kernel else "member")
    wait_alone(own, box.cgroup, everything=by_kernel)
    named = {
        value for key, _, value in (one.partition("=") for one in kernel.environment(box.process)) if "CPUSET" in key
    }
    assert named, "the program's environment contains its CPUs"
    exclusivity = {one["cgroup"]: one["exclusivity"] for one in cluster.instance.state("/v1/containers")}
    assert exclusivity[box.cgroup.path.lstrip("/")] == ("partition" if by_kernel else "pool")


def wait_alone(cpus: frozenset[int], group: Cgroup, *, everything: bool) -> None:
    """Waits until no process outside a cgroup may run on its CPUs. Raises TimeoutError with the remaining processes."""
    try:
        until(lambda: not intruders(cpus, group, everything=everything), "every other process has left its CPUs")
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {intruders(cpus, group, everything=everything)}") from None


def intruders(cpus: frozenset[int], group: Cgroup, *, everything: bool) -> list[str]:
    """Returns the processes outside a cgroup that may run on the given CPUs: only those in pods, or, with `everything`,
    all those on the node.

    Kernel threads, which have no command line, are left out, since a kernel thread may be bound to one CPU. Without
    `everything`, pause processes are left out, too: the pool does not move them, since they sleep forever.
    """
    top = CGROUPS if everything else CGROUPS / "kubepods.slice"
    found = []
    for file in top.rglob("cgroup.procs"):
        if file.parent == group.directory:
            continue
        for pid in map(int, file.read_text().split()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                left = not command or (command.startswith(PAUSE) and not everything)
                if not left and kernel.cpus_allowed(pid) & cpus:
                    found.append(f"{pid} {command[:60]!r} in {file.parent}")
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@pytest.mark.parametrize(("name", "mode"), list(cases()))
def test_containers_of_an_example_get_their_resources(cluster: Cluster, others: None, name: str, mode: str) -> None:
    """The example starts, and the kernel's files, read inside and outside the container, match the claim's record."""
    path = next(path for path in PATHS if path.stem == name)
    backend = cluster.instance.lease()
    assert (backend["exclusivity"], bool(backend["exclusivityReason"])) == {
        "auto": ("partition", False),
        "pool": ("pool", False),
        "without SYS_ADMIN": ("pool", True),
    }[mode]
    documents = read_manifest(path)
    pods = [ManifestPod(cluster, document, documents) for document in pods_of(name, documents)]
    assert pods, "the example has a pod"
    try:
        for pod in pods:
            pod.start()
            checked = [check(cluster, pod, container, mode) for container in pod.document["spec"]["containers"]]
            assert any(checked), "a container of the pod uses a claim"
        assert cluster.instance.state("/v1/backend")["status"]["problems"] == []
    finally:
        for pod in pods:
            pod.end()
