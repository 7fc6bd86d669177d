# SPDX-License-Identifier: Apache-2.0
"""Fills the node with prepared claims and running containers, and creates individual pods to measure."""

import itertools
import re
import time
from contextlib import suppress

from tests.fakes.scheduler import allocate
from tests.stage.pods import NAMESPACE, Box, Document, StagePod, cpu_set, cpus, delete_claim, memory
from tests.stage.process import StageError, wait_for
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

_CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
_MIB = 1 << 20
_SETTLE_SECONDS = 2.0
_VARIABLE = re.compile(r"DRA_CPUSET_[^=\"]+=([0-9,-]+)")
# The machine has 128 CPUs. Some of them must always be free for the measured claim.
CPU_CLAIMS = 100
"""Maximum number of claims with CPUs; additional claims have only memory."""


class Load:
    """The node's load, in addition to the measured pod. It never decreases."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._numbers = itertools.count(1)
        self._claims: list[Document] = []
        classes = stage.api("/apis/resource.k8s.io/v1/deviceclasses")["items"]
        self._classes = {one["metadata"]["name"]: one for one in classes}
        self._slices = stage.slices()
        self._waiting: list[StagePod] = []
        self.claims = 0
        self.containers = 0
        self.plain: list[Box] = []

    def _requests(self, count: int) -> list[Document]:
        wanted = [cpus(count)] if count else []
        return [*wanted, memory(16 * _MIB)] if "dra.memory" in self._stage.settings.drivers or not wanted else wanted

    def pod(self, count: int) -> StagePod:
        """Returns a pod with an allocated claim, for some CPUs or for memory only."""
        pod = StagePod(self._stage, f"pod-{next(self._numbers)}")
        requests = self._requests(count)
        devices: Document = {"requests": requests}
        if len(requests) > 1:
            devices["constraints"] = [{"matchAttribute": "resource.kubernetes.io/numaNode"}]
        body = {"metadata": {"name": f"{pod.name}-claim"}, "spec": {"devices": devices}}
        made = self._stage.api(_CLAIMS, "POST", body)
        # The scheduler runs in this process, because the fake scheduler would reread every object for every claim.
        chosen = allocate(made, self._slices, self._classes, others=self._claims, pods=[pod.reference])
        pod.claim = self._stage.api(f"{_CLAIMS}/{made['metadata']['name']}/status", "PUT", chosen)
        self._claims.append(pod.claim)
        return pod

    def plain_pod(self) -> StagePod:
        """Returns a pod without a claim."""
        return StagePod(self._stage, f"plain-{next(self._numbers)}")

    def delete_claim(self, pod: StagePod) -> None:
        """Deletes the pod's claim, if any. The claim must already be unprepared."""
        if pod.claim is not None:
            self._claims.remove(pod.claim)
            delete_claim(self._stage, pod.claim["metadata"]["name"])

    def fill_claims(self, wanted: int) -> None:
        """Prepares claims until the given number of claims is prepared."""
        while self.claims < wanted:
            pod = self.pod(1 if self.claims < CPU_CLAIMS else 0)
            pod.prepare()
            self._waiting.append(pod)
            self.claims += 1

    def fill_containers(self, wanted: int) -> None:
        """Starts containers until the given number is running, alternately without a claim and with a prepared claim.
        If all prepared claims have a container, the remaining containers are started without a claim.
        """
        while self.containers < wanted:
            is_plain = self.containers % 2 == 0 or not self._waiting
            pod = self.plain_pod() if is_plain else self._waiting.pop()
            try:
                box = pod.run()
            except AnsweredError:
                box = self._replace(pod).run()
            self.containers += 1
            if is_plain:
                self.plain.append(box)

    def _replace(self, pod: StagePod) -> StagePod:
        """Replaces a pod whose claim the driver lost during a restart."""
        if pod.claim is None:
            raise StageError("a container without a claim was refused")
        count = len(self._taken(pod))
        self._claims.remove(pod.claim)
        pod.end()
        fresh = self.pod(count)
        fresh.prepare()
        return fresh

    def settle(self, pod: StagePod) -> float:
        """Waits up to 2 s for all containers without a claim to leave the pod's claimed CPUs. Returns how many seconds
        it waited.

        If the kernel keeps other containers off these CPUs, returns 0 immediately.
        """
        began = time.monotonic()
        if self._stage.settings.partitions:
            return 0.0
        taken = self._taken(pod)
        with suppress(StageError):
            wait_for(
                "other containers to leave the CPUs",
                lambda: not any(box.cpus() & taken for box in self.plain),
                _SETTLE_SECONDS,
            )
        return time.monotonic() - began

    def _taken(self, pod: StagePod) -> set[int]:
        """Returns the claim's CPUs. They are parsed from the environment variable ``DRA_CPUSET_...`` in the claim's CDI
        file, which programs such as KubeVirt also read.
        """
        files = self._stage.paths.cdi_dir.glob(f"*{pod.claim_uid}*")
        found = [_VARIABLE.search(file.read_text()) for file in files]
        return {cpu for match in found if match for cpu in cpu_set(match[1])}
