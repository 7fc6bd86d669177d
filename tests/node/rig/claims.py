# SPDX-License-Identifier: Apache-2.0
"""A pod with claims as the kubelet handles it: the claims are prepared, and the sandbox and the containers with their
CDI devices are created. When the pod ends, all of them are removed in the reverse order.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numa_contract.cpuset import parse_cpu_list
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, cdi_file_name, cpu_env_key

from tests.node.rig.node import CDI_DIRECTORY
from tests.node.rig.pod_cgroups import Qos
from tests.node.rig.pods import FOREVER, Container, Pod, Resources
from tests.node.rig.wait import until
from tests.stage.pods import opaque

if TYPE_CHECKING:
    from tests.node.rig.cluster import Cluster

# The kubelet's limit for a container whose spec requests no hugepages.
NO_PAGES = Resources(hugepages={"2MB": 0, "1GB": 0})


@dataclass(frozen=True, slots=True)
class ClaimOptions:
    """The specification of a claim."""

    requests: Sequence[Mapping[str, Any]]
    config: Sequence[Mapping[str, Any]] = ()
    """Opaque parameters, as returned by cpu_config() and memory_config()."""
    aligned: bool = True
    """Whether all of the claim's devices must be on one NUMA node."""

    def spec(self) -> dict[str, Any]:
        """Returns the claim's spec."""
        devices: dict[str, Any] = {"requests": list(self.requests), "config": list(self.config)}
        if self.aligned and len(self.requests) > 1:
            devices["constraints"] = [{"matchAttribute": "resource.kubernetes.io/numaNode"}]
        return {"devices": {key: value for key, value in devices.items() if value}}


def cpu_config(*requests: str, **fields: Any) -> dict[str, Any]:
    """Returns parameters for dra.cpu, for some or all of the claim's requests."""
    return opaque(CPU_DRIVER, "cpuConfig", fields, *requests)


def memory_config(*requests: str, **fields: Any) -> dict[str, Any]:
    """Returns parameters for dra.memory, for some or all of the claim's requests."""
    return opaque(MEMORY_DRIVER, "memoryConfig", fields, *requests)


def is_cpu_request(request: Mapping[str, Any]) -> bool:
    """Returns True if a request, or its first alternative, is for CPUs."""
    exactly = request.get("exactly") or request["firstAvailable"][0]
    return str(exactly["deviceClassName"]) == CPU_DRIVER


class ClaimPod:
    """A pod whose claims are allocated by the constructor; its methods do everything else."""

    def __init__(
        self,
        cluster: "Cluster",
        name: str,
        claim_options: Sequence[ClaimOptions],
        *,
        qos: Qos,
        overcommit: bool = False,
    ) -> None:
        self._cluster = cluster
        self._claim_options = claim_options
        self.name = name
        self._qos = qos
        self.uid = str(uuid.uuid4())
        made = [(f"{name}-claim{number or ''}", options) for number, options in enumerate(claim_options)]
        reference = {"name": name, "uid": self.uid}
        self.claims = [cluster.claim(name, options, reference, overcommit=overcommit) for name, options in made]
        self.cdi: list[str] = []
        """Devices of all of the pod's claims."""
        self._starts = 0
        self._sandbox: Future[Pod] | None = cluster.in_background(self._make_sandbox)

    @property
    def claim_uid(self) -> str:
        """Returns the UID of the pod's claim, or of its first claim if it has several."""
        return str(self.claims[0]["metadata"]["uid"])

    def prepare(self) -> float:
        """Has the kubelet prepare the claims and returns the duration in seconds. Raises AnsweredError."""
        began = time.monotonic()
        names = [claim["metadata"]["name"] for claim in self.claims]
        spec = {
            "containers": [{"name": "main", "resources": {"claims": [{"name": name} for name in names]}}],
            "resourceClaims": [{"name": name, "resourceClaimName": name} for name in names],
        }
        document = {"metadata": {"namespace": "default", "name": self.name, "uid": self.uid}, "spec": spec}
        given = self._cluster.kubelet("prepare", pod=document, claims=self.claims)
        # A repeated Prepare appends the same ids to the kubelet's cache again. Duplicates are removed, since containerd
        # also uses each id only once.
        self.cdi = list(dict.fromkeys(given["main"]))
        return time.monotonic() - began

    def unprepare(self) -> None:
        """Has the kubelet unprepare the claims."""
        self._cluster.kubelet("unprepare", pod_uid=self.uid)

    @property
    def cpus(self) -> frozenset[int]:
        """Returns the CPUs of all requests in the first claim's CDI file, even if no service is running."""
        document = json.loads((CDI_DIRECTORY / cdi_file_name(CPU_DRIVER, self.claim_uid)).read_text())
        env = [entry for device in document["devices"] for entry in device["containerEdits"]["env"]]
        named = [e.split("=", 1)[1] for e in env if e.startswith(cpu_env_key(self.claim_uid, None))]
        return frozenset().union(*map(parse_cpu_list, named))

    @property
    def sandbox(self) -> Pod:
        """Returns the pod's sandbox, which is created in the background. Its cgroup does not allow hugepages, as in a
        pod that the kubelet has just created.
        """
        if self._sandbox is None:
            self._sandbox = self._cluster.in_background(self._make_sandbox)
        return self._sandbox.result()

    def _make_sandbox(self) -> Pod:
        return self._cluster.node.pod(self.name, uid=self.uid, qos=self._qos)

    def settle(self) -> None:
        """Waits for the sandbox if one is being created."""
        if self._sandbox is not None:
            self._sandbox.result()

    def create(self, name: str = "main", command: Sequence[str] = FOREVER, **options: Any) -> Container:
        """Creates a container with the devices of all claims. Raises CriError if it is rejected."""
        self._starts += 1
        wanted: dict[str, Any] = {"cdi": self.cdi, "resources": NO_PAGES, "attempt": self._starts} | options
        return self.sandbox.create(name, command, **wanted)

    def run(
        self, name: str = "main", command: Sequence[str] = FOREVER, *, mode: str | None = "", **options: Any
    ) -> Container:
        """Creates and starts a container, and asserts that the kernel isolates its CPUs as expected.

        `mode` is the expected cpuset.cpus.partition; "" means the one that settings and claims request. If it is None,
        nothing is asserted.
        """
        box = self.create(name, command, **options).start()
        if (wanted := self._mode() if mode == "" else mode) and options.get("cdi", self.cdi):
            with suppress(FileNotFoundError, ProcessLookupError):  # the container has exited
                assert box.partition == wanted
        return box

    def _mode(self) -> str | None:
        """Returns the expected cpuset.cpus.partition: root or isolated, or member if the pool enforces the claim.
        Returns None if the claims request no CPUs.
        """
        if not any(is_cpu_request(request) for options in self._claim_options for request in options.requests):
            return None
        given = [
            one["opaque"]["parameters"].get("cpuConfig", {})
            for options in self._claim_options
            for one in options.config
        ]
        shared = any(one.get("sharing") == "pod" or one.get("poolCPUs") for one in given)
        if shared or self._cluster.exclusivity == "pool":
            return "member"
        return "isolated" if any(one.get("isolation") == "isolated" for one in given) else "root"

    def remove_sandbox(self) -> None:
        """Stops the containers and removes the sandbox, if one exists; the claim stays prepared, and a new sandbox can
        be created.
        """
        if self._sandbox is not None:
            self._sandbox.result().remove()
            self._sandbox = None

    def end(self) -> None:
        """Ends the pod: first its containers, then the claims. Ending it twice changes nothing."""
        self.remove_sandbox()
        if self.claims:
            # The resources stay allocated until the containers are reported as exited; a kubelet would retry.
            until(lambda: self.uid not in self._reported(), f"the backend reports no container of {self.name}")
            self.unprepare()
            for claim in self.claims:
                self._cluster.delete_claim(claim["metadata"]["name"])
            self.claims = []

    def _reported(self) -> set[str]:
        """Returns the pods that the backend reports."""
        return {one["podUid"] for one in self._cluster.instance.state("/v1/containers")}
