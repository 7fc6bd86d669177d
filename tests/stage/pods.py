# SPDX-License-Identifier: Apache-2.0
"""The life cycle of pods on the stage, from the claim through the scheduler, the kubelet and the runtime to the pod's
removal.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numa_contract.cpuset import parse_cpu_list

from tests.fakes.scheduler import schedule
from tests.stage.process import wait_for
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

NAMESPACE = "default"
_CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
Document = dict[str, Any]


def device_request(
    name: str, device_class: str, capacity: str, amount: int | str, numa_node: int | None = None
) -> Document:
    """Returns a request for an amount of a capacity, on one NUMA node if one is given."""
    exact_request: Document = {"deviceClassName": device_class, "capacity": {"requests": {capacity: str(amount)}}}
    if numa_node is not None:
        expression = f'device.attributes["resource.kubernetes.io"].numaNode == {numa_node}'
        exact_request["selectors"] = [{"cel": {"expression": expression}}]
    return {"name": name, "exactly": exact_request}


def cpus(count: int, name: str = "cpus", numa_node: int | None = None) -> Document:
    """Returns a request for CPUs."""
    return device_request(name, "dra.cpu", "dra.cpu/cpu", count, numa_node)


def memory(size: int | str, name: str = "memory", numa_node: int | None = None) -> Document:
    """Returns a request for memory, in bytes or as a quantity."""
    return device_request(name, "dra.memory", "size", size, numa_node)


def hugepages(size: int | str, page: str = "2m", name: str = "pages", numa_node: int | None = None) -> Document:
    """Returns a request for hugepages of one size."""
    return device_request(name, f"dra.hugepages-{page}", "size", size, numa_node)


def opaque(driver: str, section: str, fields: Document, *requests: str) -> Document:
    """Returns a configuration entry with parameters for a driver, for some or all requests."""
    parameters = {"apiVersion": "v1alpha1", section: fields}
    return {"requests": list(requests), "opaque": {"driver": driver, "parameters": parameters}}


def make_claim(
    stage: Stage,
    name: str,
    requests: Sequence[Document],
    pods: Sequence[Mapping[str, str]],
    config: Sequence[Document] = (),
) -> Document:
    """Creates a claim and has the scheduler allocate it and reserve it for pods (``name`` and ``uid``)."""
    devices: Document = {"requests": list(requests), "config": list(config)}
    if len(requests) > 1:
        devices["constraints"] = [{"matchAttribute": "resource.kubernetes.io/numaNode"}]
    stage.api(_CLAIMS, "POST", {"metadata": {"name": name}, "spec": {"devices": devices}})
    return schedule(stage.server, NAMESPACE, name, pods=[dict(pod) for pod in pods], node=stage.settings.node)


def delete_claim(stage: Stage, name: str, namespace: str = NAMESPACE) -> None:
    """Deletes a claim, as the controller does once its pod is gone."""
    stage.api(f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}", "DELETE")


@dataclass(slots=True)
class Box:
    """A container that the runtime has created."""

    stage: Stage
    described: Document

    @property
    def id(self) -> str:
        """Returns the container id."""
        return str(self.described["id"])

    @property
    def env(self) -> dict[str, str]:
        """Returns the environment with which the container was created."""
        return dict(self.described["env"])

    @property
    def mounts(self) -> dict[str, Path]:
        """Returns the mounts with which the container was created, as a map from the path in the container to the path
        on the host.
        """
        return {mount["destination"]: Path(mount["source"]) for mount in self.described["mounts"]}

    @property
    def directory(self) -> Path:
        """Returns the container's cgroup in the fake tree, which exists only while the container runs."""
        return Path(self.described["cgroup"])

    def read(self, name: str) -> str:
        """Reads a file of the container's cgroup."""
        return (self.directory / name).read_text().strip()

    def cpus(self) -> set[int]:
        """Returns the CPUs that the kernel would currently let the container use."""
        # A real kernel's file is never empty; a plain file is empty for a moment while it is being written.
        return cpu_set(wait_for("a cpuset", lambda: self.read("cpuset.cpus.effective"), 2.0))

    def wait_for_cpus(self, cpus: set[int]) -> None:
        """Waits until the container may use exactly these CPUs."""
        wait_for(f"container {self.described['name']} to have the CPUs {sorted(cpus)}", lambda: self.cpus() == cpus)

    def start(self) -> None:
        """Starts the container."""
        self.described = self.stage.runtime("start_container", container=self.id)

    def stop(self) -> None:
        """Stops the container."""
        self.stage.runtime("stop_container", container=self.id)

    def remove(self) -> None:
        """Removes the container, whether or not it has been stopped."""
        self.stage.runtime("remove_container", container=self.id)


@dataclass(slots=True)
class StagePod:
    """A pod on the node, with its claim if it has one. If it is used as a context manager, the pod is terminated on
    exit from the block.
    """

    stage: Stage
    name: str
    claim: Document | None = None
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    cdi_ids: list[str] = field(default_factory=list)
    sandbox: Document = field(default_factory=dict)
    namespace: str = NAMESPACE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.end()
        except (AnsweredError, OSError):
            # An error raised in the block takes precedence over one raised while terminating the pod.
            if error is None:
                raise

    @property
    def reference(self) -> dict[str, str]:
        """Returns the pod's entry in ``reservedFor``."""
        return {"name": self.name, "uid": self.uid}

    @property
    def claim_uid(self) -> str:
        """Returns the claim's UID."""
        return str((self.claim or {})["metadata"]["uid"])

    def document(self) -> Document:
        """Returns the Pod object with the fields that the kubelet reads."""
        uses = [{"name": "claim"}] if self.claim else []
        spec: Document = {"containers": [{"name": "app", "resources": {"claims": uses}}]}
        if self.claim:
            spec["resourceClaims"] = [{"name": "claim", "resourceClaimName": self.claim["metadata"]["name"]}]
        return {"metadata": {"namespace": self.namespace, "name": self.name, "uid": self.uid}, "spec": spec}

    def prepare(self) -> None:
        """Has the kubelet prepare the claim. Raises AnsweredError."""
        given = self.stage.kubelet("prepare", pod=self.document(), claims=[self.claim] if self.claim else [])
        # The kubelet appends the IDs from a repeated Prepare to the previous ones, but the runtime uses each ID only
        # once.
        self.cdi_ids = list(dict.fromkeys(given["app"]))

    def run_sandbox(self) -> None:
        """Creates the sandbox."""
        self.sandbox = self.stage.runtime("run_pod_sandbox", name=self.name, uid=self.uid, namespace=self.namespace)
        group = self.stage.paths.cgroup_root / self.sandbox["cgroup_parent"].lstrip("/")
        # The kubelet sets these limits (cm/cgroup_manager_linux.go): a pod whose spec does not request hugepages gets
        # none.
        for limit in group.glob("hugetlb.*.max"):
            limit.write_text("0\n")

    def create(self, name: str = "app", **wanted: Any) -> Box:
        """Creates a container with the claim's devices. Raises AnsweredError if it is rejected."""
        wanted.setdefault("cdi_devices", self.cdi_ids)
        if not self.sandbox:
            self.run_sandbox()
        return Box(self.stage, self.stage.runtime("create_container", pod=self.sandbox["id"], name=name, **wanted))

    def run(self, name: str = "app", **wanted: Any) -> Box:
        """Creates and starts a container."""
        box = self.create(name, **wanted)
        box.start()
        return box

    def unprepare(self) -> None:
        """Has the kubelet unprepare the claim."""
        self.stage.kubelet("unprepare", pod_uid=self.uid)

    def end(self) -> None:
        """Terminates the pod: removes its containers and sandbox, then unprepares and deletes the claim."""
        if self.sandbox:
            self.stage.runtime("remove_pod", pod=self.sandbox["id"])
            self.sandbox = {}
        if self.claim:
            self.unprepare()
            delete_claim(self.stage, self.claim["metadata"]["name"], self.namespace)
            self.claim = None


def claim_pod(stage: Stage, name: str, *requests: Document, config: Sequence[Document] = ()) -> StagePod:
    """Returns a pod with a claim that is allocated but not prepared yet."""
    pod = StagePod(stage, name)
    pod.claim = make_claim(stage, f"{name}-claim", requests, [pod.reference], config)
    return pod


def cpu_set(text: str) -> set[int]:
    """Parses the kernel's list format."""
    return set(parse_cpu_list(text.strip()))
