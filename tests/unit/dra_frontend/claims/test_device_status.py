# SPDX-License-Identifier: Apache-2.0
"""When the driver writes a claim's device status to the API server."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    UnavailableError,
    UnreachableError,
    UnreadableError,
)
from dra_frontend.claims.device_status import (
    MAX_WRITES_PER_TICK,
    PATIENCE_SECONDS,
    PAUSE_SECONDS,
    SETTLE_SECONDS,
    SILENT_SECONDS,
    DeviceStatus,
)
from dra_frontend.claims.reconciler import Reconciler
from numa_contract.reports import BackendStatus

from tests.fakes.apiserver_devices import applied
from tests.rigs import builders
from tests.rigs.builders import NODE, claim, cpus, memory
from tests.rigs.frontend import Claims, Frontend

Document = dict[str, Any]
OTHERS = {"driver": "gpu.example", "pool": "p", "device": "gpu-0", "data": {"model": "x"}}


class Api(Claims):
    """A fake API server that either applies a status to a claim or rejects it."""

    def __init__(self, *documents: Document) -> None:
        super().__init__(*documents)
        self.writes: list[str] = []
        """UIDs of the claims whose status was written."""
        self.refuses: KubeError | None = None
        self.refuses_in: dict[str, KubeError] = {}
        """Errors to raise, by the claim's namespace or UID."""
        self.keeps = True

    async def apply_claim_devices(self, namespace: str, name: str, uid: str, devices: list[Document]) -> Document:
        """Applies the status, or fails as configured."""
        self.writes.append(uid)
        if error := self.refuses or self.refuses_in.get(namespace) or self.refuses_in.get(uid):
            raise error
        if self.keeps:
            body = {"metadata": {"name": name, "uid": uid}, "status": {"devices": devices}}
            self.documents[name] = applied(self.documents[name], body, "dra-driver-numa")
        return self.documents[name]

    def entries(self, uid: str) -> list[Document]:
        """Returns the device entries from a claim's status."""
        found: list[Document] = self.documents[f"claim-{uid}"]["status"].get("devices", [])
        return found

    def enforced(self, uid: str) -> str:
        """Returns the status and reason of the Enforced condition for the claim's only device from this driver."""
        (entry,) = [one for one in self.entries(uid) if one["driver"].startswith("dra.")]
        condition = next(one for one in entry["conditions"] if one["type"] == "Enforced")
        return f"{condition['status']} {condition['reason']}"


class Node:
    """One frontend instance with a clock that advances only when the test advances it."""

    def __init__(self, path: Path, api: Api) -> None:
        self.api, self.now, self.counted = api, 1000.0, list[str]()
        self.frontend = Frontend(path, api=api)
        # The backend's lease never expires here, however long a test takes on a busy machine.
        self.frontend.backend.clock = lambda: 0.0
        self.frontend.enforce()
        self.status = self.again()

    def again(self) -> DeviceStatus:
        """Restarts the instance, which then no longer knows which statuses it has written."""
        rig = self.frontend
        self.status = DeviceStatus(self.api, rig.store, rig, rig.backend, self.counted.append, lambda: self.now)
        self.api.claim_observers = [self.status.observe]
        self.sweep = Reconciler(NODE, self.api, rig.store, rig.backend)
        return self.status

    def runs(self, *uids: str, **more: Any) -> None:
        """Reports a running container for each given claim, pinned to its claim's CPUs."""
        told = [
            builders.report(
                f"c-{uid}", **{"claims": [{"uid": uid, "driver": "dra.cpu"}], "cpus": self.cpus(uid), **more}
            )
            for uid in uids
        ]
        self.frontend.backend.containers = {one.id: one for one in told}

    def cpus(self, uid: str) -> str:
        """Returns the claim's CPUs as a list."""
        return ",".join(str(cpu) for cpu in self.frontend.cpus(uid))

    async def after(self, seconds: float) -> None:
        """Advances the clock in one-second steps."""
        for _ in range(int(seconds)):
            self.now += 1
            await asyncio.sleep(0)
            await self.status.write_due()


@pytest.fixture
def api() -> Api:
    """Returns an API server with claims for one CPU each."""
    return Api(*[claim(uid, cpus(1, device=f"cpudevnuma00{uid > 'c':d}")) for uid in "abcdef"])


@pytest.fixture
async def node(tmp_path: Path, api: Api) -> Node:
    """Returns an instance that has been running for a second and has no claims."""
    node = Node(tmp_path, api)
    await node.after(1)
    return node


async def test_a_claims_status_is_written_once_when_its_container_runs(node: Node, api: Api) -> None:
    """Neither Prepare nor the container's start causes an immediate write. A single write shortly afterwards covers
    both events.
    """
    await node.frontend.prepare("a")
    await node.after(1)
    node.runs("a")
    assert not api.writes
    await node.after(2 * SETTLE_SECONDS + 1)
    assert api.writes == ["a"]
    assert api.enforced("a") == "True Exclusive"
    (entry,) = api.entries("a")
    assert entry["data"] == {"cpus": node.cpus("a"), "isolation": "exclusive", "numaNodes": [0]}
    node.frontend.enforce()
    await node.after(100)
    assert api.writes == ["a"]
    assert node.counted == ["written"]


async def test_the_status_of_an_unused_claim_is_written_later(node: Node, api: Api) -> None:
    """Pulling an image may take minutes, and the claim's allocation should be visible before the container runs."""
    await node.frontend.prepare("a")
    await node.after(PATIENCE_SECONDS)
    assert not api.writes
    await node.after(PATIENCE_SECONDS + 1)
    assert api.enforced("a") == "Unknown NoContainer"
    node.runs("a")
    await node.after(PAUSE_SECONDS + 1)
    assert api.enforced("a") == "True Exclusive"


async def test_transient_states_are_not_written(node: Node, api: Api) -> None:
    """Neither a container restart nor CPUs that are briefly shared cause a write."""
    await node.frontend.prepare("a")
    node.runs("a")
    await node.after(10)
    node.runs()
    await node.after(30)
    node.runs("a", cpus="0-3")
    await node.after(1)
    node.runs("a")
    await node.after(30)
    assert api.writes == ["a"]


async def test_a_lasting_problem_and_its_end_are_written(node: Node, api: Api) -> None:
    """A status that keeps changing is written at most once per interval for each claim."""
    await node.frontend.prepare("a")
    node.runs("a")
    await node.after(10)
    node.runs("a", cpus="0-3")
    await node.after(PAUSE_SECONDS)
    assert api.enforced("a") == "False CPUsDiffer"
    for _ in range(30):
        node.runs("a")
        await node.after(5)
        node.runs("a", cpus="0-3")
        await node.after(5)
    assert len(api.writes) <= 2 + 300 / PAUSE_SECONDS
    node.runs("a")
    await node.after(2 * PAUSE_SECONDS)
    assert api.enforced("a") == "True Exclusive"


async def test_many_simultaneous_changes_are_written_at_a_limited_rate(node: Node, api: Api) -> None:
    """A node that starts many pods at once must not flood a large cluster's API server."""
    for uid in "abcdef":
        await node.frontend.prepare(uid)
    node.runs(*"abcdef")
    for second in range(1, 12):
        await node.after(1)
        assert len(api.writes) <= MAX_WRITES_PER_TICK * second
    assert sorted(api.writes) == list("abcdef")


async def test_a_restart_writes_only_missing_entries(node: Node, api: Api) -> None:
    """The driver reads the claims anyway, and they contain the status stored on the server, so the driver writes only
    the missing entries.
    """
    for uid in "ab":
        await node.frontend.prepare(uid)
    node.runs(*"ab")
    await node.after(10)
    del api.documents["claim-b"]["status"]["devices"]
    node.again()
    await node.after(2 * PAUSE_SECONDS)
    assert sorted(api.writes) == ["a", "b"], "nothing is written before the claims are read"
    for _ in "ab":
        await node.sweep.sweep_next()
    await node.after(10)
    assert sorted(api.writes) == ["a", "b", "b"]
    await node.frontend.prepare("a")
    await node.after(30)
    assert len(api.writes) == 3


async def test_other_drivers_entries_are_preserved(node: Node, api: Api) -> None:
    """A claim may have devices from several drivers. The entries for both of this project's drivers are written
    together.
    """
    api.add(claim("x", cpus(1), memory("1Mi")))
    api.documents["claim-x"]["status"]["devices"] = [OTHERS]
    for driver in ("dra.cpu", "dra.memory"):
        await node.frontend.prepare("x", driver)
    await node.after(3 * PATIENCE_SECONDS)
    assert api.writes == ["x"]
    assert [one["driver"] for one in api.entries("x")] == ["gpu.example", "dra.cpu", "dra.memory"]
    await node.frontend.unprepare("x")
    await node.frontend.unprepare("x", "dra.memory")
    await node.after(100)
    assert api.writes == ["x"], "the server drops the entries when the claim is deallocated"


@pytest.mark.parametrize(
    ("error", "result", "most"),
    [
        (ForbiddenError("patch", "no"), "denied", 12),
        (UnavailableError("patch", "away"), "failed", 60),
        (InvalidError("patch", "not a device of it"), "failed", 8 * 6),
    ],
)
async def test_writes_pause_if_the_server_rejects_them(
    node: Node, api: Api, caplog: pytest.LogCaptureFixture, error: KubeError, result: str, most: int
) -> None:
    """Claims are still prepared as usual. The failure is logged once and counted by a metric, and retries are rare."""
    api.refuses = error
    for uid in "abcdef":
        assert (await node.frontend.prepare(uid)).error is None
    node.runs(*"abcdef")
    await node.after(3600)
    assert 2 <= len(api.writes) <= most
    assert set(node.counted) == {result}
    told = [record for record in caplog.records if "written" in record.message]
    assert len(told) == (6 if isinstance(error, InvalidError) else 1)
    api.refuses = None
    await node.after(3700)
    assert api.enforced("a") == api.enforced("f") == "True Exclusive"


async def test_writes_stop_if_the_server_drops_the_field(
    node: Node, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """An API server whose feature gate is off drops the field without an error."""
    api.keeps = False
    await node.frontend.prepare("a")
    await node.after(3600)
    assert len(api.writes) < 10
    assert set(node.counted) == {"denied"}
    (told,) = [record for record in caplog.records if "written" in record.message]
    assert "DRAResourceClaimDeviceStatus" in vars(told)["error"]


async def test_the_condition_becomes_unknown_without_a_backend(node: Node, api: Api) -> None:
    """The condition stays unchanged for the few seconds of a restart, and becomes Unknown if the backend does not come
    back.
    """
    await node.frontend.prepare("a")
    node.runs("a")
    await node.after(10)
    status = node.frontend.backend.status
    assert status is not None
    node.frontend.backend.status = status.model_copy(update={"synchronized": False})
    await node.after(SILENT_SECONDS / 2)
    assert api.writes == ["a"]
    await node.after(SILENT_SECONDS)
    assert api.enforced("a") == "Unknown NoBackend"
    node.frontend.backend.status = status
    await node.after(2 * PAUSE_SECONDS)
    assert api.enforced("a") == "True Exclusive"


async def test_a_standby_writes_nothing(tmp_path: Path, api: Api) -> None:
    """Two instances on a node would keep overwriting each other's status, so only the one whose backend enforces claims
    writes it.
    """
    node = Node(tmp_path, api)
    node.frontend.backend.status = BackendStatus(instance="i", synchronized=True, active=False)
    await node.frontend.prepare("a")
    await node.after(100)
    assert not api.writes


async def test_the_status_of_a_claim_that_is_allocated_again_is_written_again(node: Node, api: Api) -> None:
    """A claim that keeps its UID but is deallocated and allocated again loses its entries, so it is treated as new."""
    await node.frontend.prepare("a")
    await node.after(3 * PATIENCE_SECONDS)
    await node.frontend.unprepare("a")
    del api.documents["claim-a"]["status"]["devices"]
    await node.after(1)
    await node.frontend.prepare("a")
    await asyncio.sleep(0)
    await node.after(3 * PATIENCE_SECONDS)
    assert api.writes == ["a", "a"]


async def test_a_denied_write_does_not_affect_other_claims(node: Node, api: Api) -> None:
    """The server may reject the status of a claim that is no longer allocated to this node."""
    await node.frontend.prepare("a")
    api.refuses = ForbiddenError("patch", "no")
    await node.after(3 * PATIENCE_SECONDS)
    api.refuses = None
    await node.frontend.prepare("b")
    await node.after(3 * PATIENCE_SECONDS)
    assert api.writes == ["a", "b"]


@pytest.mark.parametrize("error", [UnreadableError("patch", "is nested too deep"), ConflictError("patch", "changed")])
async def test_a_malformed_response_does_not_affect_other_claims(node: Node, api: Api, error: KubeError) -> None:
    """The claim's author controls part of the response."""
    api.refuses_in["a"] = error
    for uid in "abc":
        await node.frontend.prepare(uid)
    node.runs(*"abc")
    await node.after(2 * SETTLE_SECONDS + 1)
    assert sorted(api.writes) == ["a", "b", "c"]
    await node.after(600)
    assert api.writes.count("a") <= 1 + 600 / PAUSE_SECONDS


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("patch", "HTTP 429: limit of the namespace"),
        UnavailableError("patch", "HTTP 500: failed calling webhook"),
        ForbiddenError("patch", "denied by a policy"),
    ],
    ids=("429", "500", "403"),
)
async def test_failing_writes_in_one_namespace_do_not_affect_others(node: Node, api: Api, error: KubeError) -> None:
    """Regression test: when a webhook failed for four claims in one tenant's namespace, the writes for all tenants were
    paused.
    """
    api.refuses_in["evil"] = error
    for uid in "wxyz":
        api.add(claim(uid, cpus(1, device="cpudevnuma000" if uid < "y" else "cpudevnuma001"), namespace="evil"))
    for uid in "wxyz":
        await node.frontend.prepare(uid)
    node.runs(*"wxyz")
    await node.after(60)
    await node.frontend.prepare("a")
    node.runs(*"awxyz")
    await node.after(2 * SETTLE_SECONDS + 1)
    assert api.enforced("a") == "True Exclusive"
    await node.after(3600)
    assert len(api.writes) <= 62
    api.refuses_in.clear()
    await node.after(3700)
    assert {api.enforced(uid) for uid in "wxyz"} == {"True Exclusive"}


async def test_claims_in_a_failing_namespace_do_not_use_up_the_attempts_per_tick(node: Node, api: Api) -> None:
    """After the first attempt in a namespace fails, its other claims are skipped and do not count as attempts."""
    api.refuses_in["evil"] = UnavailableError("patch", "HTTP 500: failed calling webhook")
    for uid in "wxyz":
        api.add(claim(uid, cpus(1, device="cpudevnuma000" if uid < "y" else "cpudevnuma001"), namespace="evil"))
    for uid in "wxyza":
        await node.frontend.prepare(uid)
    node.runs(*"wxyz")  # claim a is unused, so it is written later than these
    await node.status.write_due()
    node.now += 3 * PATIENCE_SECONDS
    await node.status.write_due()
    assert api.writes[1:] == ["a"]


@pytest.mark.parametrize(
    ("error", "most"), [(UnreachableError("patch", "refused"), 1), (UnavailableError("patch", "HTTP 503"), 3)]
)
async def test_writes_pause_if_the_server_fails_in_every_namespace(
    node: Node, api: Api, error: KubeError, most: int
) -> None:
    """A failed connection, or failures in three namespaces in a row, pauses all writes."""
    api.refuses = error
    for number, uid in enumerate("uvwxyz"):
        device = "cpudevnuma000" if number < 3 else "cpudevnuma001"
        api.add(claim(uid, cpus(1, device=device), namespace=f"ns-{uid}"))
        await node.frontend.prepare(uid)
    node.runs(*"uvwxyz")
    await node.after(2 * SETTLE_SECONDS)
    assert len(api.writes) <= 2 * most
    await node.after(3600)
    assert len(api.writes) <= 60 + most
    api.refuses = None
    await node.after(300)
    assert {api.enforced(uid) for uid in "uvwxyz"} == {"True Exclusive"}
