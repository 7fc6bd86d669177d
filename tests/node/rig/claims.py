# SPDX-License-Identifier: Apache-2.0
"""A pod with a claim, as the kubelet brings it to the node: prepare, sandbox, containers with CDI devices, and back."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from numa_contract.cpuset import parse_cpu_list
from numa_contract.names import CPU_DRIVER, cdi_file_name, cpu_env_key

from tests.node.rig.node import CDI_DIRECTORY
from tests.node.rig.pods import FOREVER, Container, Pod, Resources

if TYPE_CHECKING:
    from tests.node.rig.cluster import Cluster

# What the kubelet states for a container whose spec asks for no hugepages.
NO_PAGES = Resources(hugepages={"2MB": 0, "1GB": 0})


class ClaimPod:
    """The claim is allocated when this is built; everything else happens when it is asked for."""

    def __init__(
        self, cluster: "Cluster", name: str, requests: Sequence[Mapping[str, Any]], *, overcommit: bool = False
    ) -> None:
        self._cluster = cluster
        self.name = name
        self.uid = str(uuid.uuid4())
        self.claim = cluster.claim(f"{name}-claim", requests, {"name": name, "uid": self.uid}, overcommit=overcommit)
        self.cdi: list[str] = []
        self._starts = 0
        self._sandbox: Future[Pod] | None = cluster.at_once(lambda: cluster.node.pod(name, uid=self.uid))

    @property
    def claim_uid(self) -> str:
        """UID of the claim."""
        return str(self.claim["metadata"]["uid"])

    def prepare(self) -> float:
        """Lets the kubelet prepare the claim; seconds that it took. AnsweredError when it cannot."""
        began = time.monotonic()
        spec = {
            "containers": [{"name": "main", "resources": {"claims": [{"name": "claim"}]}}],
            "resourceClaims": [{"name": "claim", "resourceClaimName": self.claim["metadata"]["name"]}],
        }
        document = {"metadata": {"namespace": "default", "name": self.name, "uid": self.uid}, "spec": spec}
        given = self._cluster.kubelet("prepare", pod=document, claims=[self.claim])
        # A repeated Prepare appends to what the kubelet remembers; containerd takes each id once.
        self.cdi = list(dict.fromkeys(given["main"]))
        return time.monotonic() - began

    def unprepare(self) -> None:
        """Lets the kubelet take the claim back."""
        self._cluster.kubelet("unprepare", podUID=self.uid)

    @property
    def cpus(self) -> frozenset[int]:
        """The CPUs that the claim's CDI file gives; needs no service."""
        document = json.loads((CDI_DIRECTORY / cdi_file_name(CPU_DRIVER, self.claim_uid)).read_text())
        env = [entry for device in document["devices"] for entry in device["containerEdits"]["env"]]
        return parse_cpu_list(next(e.split("=", 1)[1] for e in env if e.startswith(cpu_env_key(self.claim_uid, None))))

    @property
    def sandbox(self) -> Pod:
        """The pod's sandbox, made beside everything else. Its group allows no hugepages, as the kubelet leaves it."""
        if self._sandbox is None:
            self._sandbox = self._cluster.at_once(lambda: self._cluster.node.pod(self.name, uid=self.uid))
        return self._sandbox.result()

    def create(self, name: str = "main", command: Sequence[str] = FOREVER, **options: Any) -> Container:
        """A container with the claim's devices; CriError when it is refused."""
        self._starts += 1
        wanted: dict[str, Any] = {"cdi": self.cdi, "resources": NO_PAGES, "attempt": self._starts} | options
        return self.sandbox.create(name, command, **wanted)

    def run(self, name: str = "main", command: Sequence[str] = FOREVER, **options: Any) -> Container:
        """As create, and started."""
        return self.create(name, command, **options).start()

    def remove_sandbox(self) -> None:
        """Ends the containers and the sandbox, if there is one; the claim stays prepared, and a new one can follow."""
        if self._sandbox is not None:
            self._sandbox.result().remove()
            self._sandbox = None

    def end(self) -> None:
        """Ends the pod: containers, then the claim. Ending it twice changes nothing."""
        self.remove_sandbox()
        if self.claim:
            self.unprepare()
            self._cluster.delete_claim(self.claim["metadata"]["name"])
            self.claim = {}
