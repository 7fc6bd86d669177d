# SPDX-License-Identifier: Apache-2.0
"""The plugin service without a connection: calls in, hooks in domain terms, answers out."""

import asyncio
from typing import Any

import pytest
from google.protobuf.internal import api_implementation
from google.protobuf.message import Message
from nri_backend._pb import nri_pb2 as pb
from nri_backend.nri.model import RefusedError, Resources, Update
from nri_backend.nri.plugin import MAX_CONTAINERS, PLUGIN_SERVICE, PluginService
from nri_backend.ttrpc import Call, Code, StatusError

from tests.rigs.nri_hooks import RecordingHooks, RecordingObserver

_POD = pb.PodSandbox(id="p1", uid="uid", name="web", namespace="default")
_CONTAINER = pb.Container(id="c1", pod_sandbox_id="p1", name="app")
_BOTH: dict[str, Any] = {"pod": _POD, "container": _CONTAINER}


class _Rig:
    """A service with what is around it."""

    def __init__(self) -> None:
        self.hooks = RecordingHooks()
        self.observer = RecordingObserver()
        self.service = PluginService(self.hooks, self.observer.call_done)

    async def call(self, method: str, request: Message, seconds: float = 0.0) -> bytes:
        return await self.service.serve(Call(PLUGIN_SERVICE, method, request.SerializeToString(), int(seconds * 1e9)))

    def fail(self, error: Exception) -> None:
        """Every hook fails from now on."""

        async def fail(_hook: str) -> None:
            raise error

        self.hooks.before = fail

    async def fails(self, method: str, request: Message, seconds: float = 0.0) -> StatusError:
        with pytest.raises(StatusError) as caught:
            await self.call(method, request, seconds)
        return caught.value


async def test_protobuf_runs_on_its_c_implementation() -> None:
    """The pure Python one needs seconds for a large snapshot."""
    assert api_implementation.Type() == "upb"


@pytest.mark.parametrize("version", ["", "v0.12.0"])
@pytest.mark.fault("protocol trap 3.1")
async def test_the_subscription_names_what_we_need_and_nothing_an_old_runtime_lacks(version: str) -> None:
    """One unknown bit closes the plugin; no bit at all would make us a validator."""
    answer = await _Rig().call("Configure", pb.ConfigureRequest(NRI_version=version))
    assert pb.ConfigureResponse.FromString(answer).events == 0x6AF


@pytest.mark.parametrize(
    ("method", "event", "hook"),
    [
        ("StartContainer", pb.START_CONTAINER, "start_container"),
        ("RemoveContainer", pb.REMOVE_CONTAINER, "remove_container"),
        ("RemovePodSandbox", pb.REMOVE_POD_SANDBOX, "remove_pod"),
        ("RunPodSandbox", pb.RUN_POD_SANDBOX, None),
        ("StopPodSandbox", pb.STOP_POD_SANDBOX, None),
        ("PostCreateContainer", pb.POST_CREATE_CONTAINER, None),
        ("PostStartContainer", pb.POST_START_CONTAINER, None),
        ("PostUpdateContainer", pb.POST_UPDATE_CONTAINER, None),
        ("PostUpdatePodSandbox", pb.POST_UPDATE_POD_SANDBOX, None),
    ],
)
@pytest.mark.fault("protocol trap 3.2")
async def test_lifecycle_events_come_both_ways_and_mean_the_same(
    method: str, event: pb.Event, hook: str | None
) -> None:
    """Runtimes before 0.12 send StateChange, later ones call a method; hook and metric are the same."""
    request = {"RemovePodSandbox": pb.RemovePodSandboxRequest(pod=_POD)}.get(method, pb.StartContainerRequest(**_BOTH))
    direct, indirect = _Rig(), _Rig()
    assert await direct.call(method, request) == b""
    assert await indirect.call("StateChange", pb.StateChangeEvent(event=event, **_BOTH)) == b""
    assert direct.hooks.names == indirect.hooks.names == ([hook] if hook else [])
    assert direct.observer.calls == indirect.observer.calls == [(method, "ok")]


async def test_events_nobody_knows_are_acknowledged() -> None:
    """A later runtime may have more of them."""
    rig = _Rig()
    assert await rig.call("StateChange", pb.StateChangeEvent(event=pb.VALIDATE_CONTAINER_ADJUSTMENT, pod=_POD)) == b""
    assert rig.hooks.seen == []


@pytest.mark.fault("protocol trap 3.3")
async def test_parts_of_a_snapshot_are_joined_and_answered_with_more() -> None:
    """A container may come before its pod, so the hook sees nothing until the last part has come; then all is new."""
    rig = _Rig()
    rig.hooks.updates = [Update("c1", Resources(cpus="0-1"))]
    parts = [
        pb.SynchronizeRequest(containers=[_CONTAINER], more=True),
        pb.SynchronizeRequest(pods=[_POD], more=True),
        pb.SynchronizeRequest(pods=[pb.PodSandbox(id="p2")]),
    ]
    answers = [pb.SynchronizeResponse.FromString(await rig.call("Synchronize", part)) for part in parts]
    assert [(answer.more, len(answer.update)) for answer in answers] == [(True, 0), (True, 0), (False, 1)]
    assert [pod.id for pod in rig.hooks.pods] == ["p1", "p2"]
    await rig.call("Synchronize", parts[2])
    assert rig.hooks.seen == [("synchronize", (2, 1)), ("synchronize", (1, 0))]


@pytest.mark.parametrize(("what", "kind"), [("containers", pb.Container), ("pods", pb.PodSandbox)])
async def test_a_snapshot_that_never_ends_is_given_up(what: str, kind: type) -> None:
    """A peer that always has more would fill the memory."""
    rig = _Rig()
    part = pb.SynchronizeRequest(**{what: [kind()] * (MAX_CONTAINERS // 2)}, more=True)
    for _ in range(2):
        await rig.call("Synchronize", part)
    assert (await rig.fails("Synchronize", part)).code == Code.RESOURCE_EXHAUSTED
    assert rig.service.synchronized.is_set()
    assert rig.service.sync_failure == f"the snapshot of the runtime has more than 16384 {what}"


async def test_a_failed_snapshot_is_known_and_answered_as_an_error() -> None:
    """Some runtimes keep the connection of a plugin that failed and never call it again."""
    rig = _Rig()
    rig.fail(ValueError("boom"))
    assert (await rig.fails("Synchronize", pb.SynchronizeRequest())).code == Code.INTERNAL
    assert rig.service.synchronized.is_set()
    assert rig.service.sync_failure


@pytest.mark.parametrize(
    ("service", "method"),
    [
        (PLUGIN_SERVICE, "UpdatePodSandbox"),
        (PLUGIN_SERVICE, "ValidateContainerAdjustment"),
        (PLUGIN_SERVICE, "Nothing"),
        ("nri.Other", "Configure"),
    ],
)
async def test_what_is_not_subscribed_is_unimplemented(service: str, method: str) -> None:
    """The runtime relies on code 12. Only the plugin service is served on this connection."""
    rig = _Rig()
    with pytest.raises(StatusError, match=f"there is no method {service}/{method}") as caught:
        await rig.service.serve(Call(service, method, b""))
    assert caught.value.code == Code.UNIMPLEMENTED
    assert rig.observer.calls == [(method, "unimplemented")]


@pytest.mark.fault("protocol trap 3.5")
async def test_a_refusal_is_answered_with_its_text() -> None:
    """Only an answered error keeps a container from being created; the text reaches the pod's events."""
    rig = _Rig()
    rig.fail(RefusedError("claim x is not yours; name it in the pod's spec"))
    error = await rig.fails("CreateContainer", pb.CreateContainerRequest(**_BOTH))
    assert (error.code, error.message) == (9, "claim x is not yours; name it in the pod's spec")
    assert rig.observer.calls == [("CreateContainer", "refused")]


# A timeout inside a hook is not our own deadline.
@pytest.mark.parametrize("bug", [ValueError("secret detail"), TimeoutError("secret detail")])
async def test_a_bug_is_answered_without_its_details_and_logged_with_them(
    bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The pod's author learns where to look, the log has the traceback, and the next call is served."""
    rig = _Rig()
    rig.fail(bug)
    error = await rig.fails("StartContainer", pb.StartContainerRequest(**_BOTH))
    assert (error.code, rig.observer.calls) == (Code.INTERNAL, [("StartContainer", "error")])
    assert "secret" not in error.message
    assert "secret detail" in caplog.text
    rig.hooks.before = None
    assert await rig.call("StartContainer", pb.StartContainerRequest(**_BOTH)) == b""


# Seconds in the call, milliseconds in Configure; the runtime's default.
@pytest.mark.parametrize(
    ("in_call", "configured", "ours"), [(4.0, 0, 3), (0.0, 8000, 6), (4.0, 8000, 3), (0.0, 0, 1.5)]
)
@pytest.mark.fault("protocol trap 3.6")
async def test_a_hook_that_runs_out_of_time_is_an_error_before_the_runtime_gives_up(
    in_call: float, configured: int, ours: float
) -> None:
    """Silence fails open: the runtime throws us out and starts the container without us."""
    rig = _Rig()

    async def never(_hook: str) -> None:
        await asyncio.Event().wait()

    rig.hooks.before = never
    await rig.call("Configure", pb.ConfigureRequest(request_timeout=configured))
    error = await rig.fails("CreateContainer", pb.CreateContainerRequest(**_BOTH), in_call)
    assert (error.code, error.message) == (4, f"CreateContainer was not done within {ours} s; it is tried again")
    assert rig.observer.calls[-1] == ("CreateContainer", "timeout")


async def test_a_request_that_cannot_be_read_is_an_invalid_argument() -> None:
    """A sound envelope may hold nonsense."""
    with pytest.raises(StatusError) as caught:
        await _Rig().service.serve(Call(PLUGIN_SERVICE, "CreateContainer", b"\xff\xff"))
    assert caught.value.code == Code.INVALID_ARGUMENT
