# SPDX-License-Identifier: Apache-2.0
"""The plugin service without a connection: calls, hooks and responses."""

import asyncio
from typing import Any

import pytest
from google.protobuf.internal import api_implementation
from google.protobuf.message import Message
from nri_backend._pb import nri_pb2 as pb
from nri_backend.nri.model import RejectedError, Resources, Update
from nri_backend.nri.plugin import MAX_CONTAINERS, PLUGIN_SERVICE, PluginService
from nri_backend.nri.wire import Call, Code, StatusError

from tests.rigs.nri_hooks import RecordingHooks, RecordingObserver

_POD = pb.PodSandbox(id="p1", uid="uid", name="web", namespace="default")
_CONTAINER = pb.Container(id="c1", pod_sandbox_id="p1", name="app")
_BOTH: dict[str, Any] = {"pod": _POD, "container": _CONTAINER}


class _Rig:
    """A service whose hooks and observer record their calls."""

    def __init__(self) -> None:
        self.hooks = RecordingHooks()
        self.observer = RecordingObserver()
        self.service = PluginService(self.hooks, self.observer.call_done)

    async def call(self, method: str, request: Message, seconds: float = 0.0) -> bytes:
        return await self.service.serve(Call(PLUGIN_SERVICE, method, request.SerializeToString(), int(seconds * 1e9)))

    def fail(self, error: Exception) -> None:
        """Makes all later hooks raise the given error."""

        async def fail(_hook: str) -> None:
            raise error

        self.hooks.before = fail

    async def fails(self, method: str, request: Message, seconds: float = 0.0) -> StatusError:
        with pytest.raises(StatusError) as caught:
            await self.call(method, request, seconds)
        return caught.value


async def test_protobuf_runs_on_its_c_implementation() -> None:
    """The pure Python implementation takes seconds to decode a large snapshot."""
    assert api_implementation.Type() == "upb"


@pytest.mark.parametrize("version", ["", "v0.12.0"])
async def test_the_plugin_subscribes_only_to_events_that_every_runtime_supports(version: str) -> None:
    """An unknown bit makes the runtime disconnect the plugin, and an empty mask would subscribe to validation too."""
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
async def test_a_lifecycle_event_calls_the_same_hook_as_a_method_and_as_a_state_change(
    method: str, event: pb.Event, hook: str | None
) -> None:
    """Runtimes with an NRI release before 0.12 send StateChange, and later runtimes call a method. The metric is the
    same in both cases.
    """
    request = {"RemovePodSandbox": pb.RemovePodSandboxRequest(pod=_POD)}.get(method, pb.StartContainerRequest(**_BOTH))
    direct, indirect = _Rig(), _Rig()
    assert await direct.call(method, request) == b""
    assert await indirect.call("StateChange", pb.StateChangeEvent(event=event, **_BOTH)) == b""
    assert direct.hooks.names == indirect.hooks.names == ([hook] if hook else [])
    assert direct.observer.calls == indirect.observer.calls == [(method, "ok")]


async def test_unknown_events_are_acknowledged() -> None:
    """A newer runtime may send more events."""
    rig = _Rig()
    assert await rig.call("StateChange", pb.StateChangeEvent(event=pb.VALIDATE_CONTAINER_ADJUSTMENT, pod=_POD)) == b""
    assert rig.hooks.seen == []


async def test_a_snapshots_chunks_are_joined_before_the_hook_is_called() -> None:
    """Each chunk except the last is answered with ``more``. A second snapshot starts with an empty list."""
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


@pytest.mark.parametrize(("objects", "kind"), [("containers", pb.Container), ("pods", pb.PodSandbox)])
async def test_a_snapshot_with_too_many_objects_is_an_error(objects: str, kind: type) -> None:
    """The limit applies to the sum of all chunks."""
    rig = _Rig()
    part = pb.SynchronizeRequest(**{objects: [kind()] * (MAX_CONTAINERS // 2)}, more=True)
    for _ in range(2):
        await rig.call("Synchronize", part)
    assert (await rig.fails("Synchronize", part)).code == Code.RESOURCE_EXHAUSTED
    assert rig.service.synchronized.is_set()
    assert rig.service.sync_failure == f"the runtime's snapshot has more than 16384 {objects}"


async def test_a_failed_snapshot_is_an_error_response_and_sets_sync_failure() -> None:
    """The session then closes the connection, because some runtimes would keep it open and never call the plugin
    again.
    """
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
async def test_other_methods_and_services_are_unimplemented(service: str, method: str) -> None:
    """The runtime relies on code 12, UNIMPLEMENTED."""
    rig = _Rig()
    with pytest.raises(StatusError, match=f"there is no method {service}/{method}") as caught:
        await rig.service.serve(Call(service, method, b""))
    assert caught.value.code == Code.UNIMPLEMENTED
    assert rig.observer.calls == [(method, "unimplemented")]


async def test_a_rejection_is_an_error_response_with_its_message() -> None:
    """Only an error response prevents the container from being created. The message appears in the pod's events."""
    rig = _Rig()
    rig.fail(RejectedError("claim x is not yours; name it in the pod's spec"))
    error = await rig.fails("CreateContainer", pb.CreateContainerRequest(**_BOTH))
    assert (error.code, error.message) == (9, "claim x is not yours; name it in the pod's spec")
    assert rig.observer.calls == [("CreateContainer", "refused")]


async def test_a_hook_that_is_cancelled_at_its_deadline_can_wait_for_its_cleanup() -> None:
    """The hook waits several times before and after the cancellation. For example, a cancelled start kills its
    container.
    """
    rig, steps = _Rig(), list[str]()

    async def wait(_hook: str) -> None:
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(60):
                steps.append("waits")
                await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            steps.append("cleaned up")

    rig.hooks.before = wait
    error = await rig.fails("StartContainer", pb.StartContainerRequest(**_BOTH), 0.04)
    assert (error.code, steps) == (Code.DEADLINE_EXCEEDED, ["waits", "cleaned up"])


async def test_a_hook_continues_in_the_same_task_after_each_wait() -> None:
    """The timer for the deadline starts when the hook first waits. A hook that never waits has no deadline."""
    rig, started = _Rig(), list[bool]()

    async def wait(hook: str) -> None:
        task = asyncio.current_task()
        for number in range(3):
            if hook == "start_container":
                await asyncio.sleep(0.001 * number)
            started.append(asyncio.current_task() is task)

    rig.hooks.before = wait
    await rig.call("StartContainer", pb.StartContainerRequest(**_BOTH))
    await rig.call("RemoveContainer", pb.RemoveContainerRequest(**_BOTH))
    assert started == [True] * 6


# A TimeoutError that a hook raises must not be mistaken for the service's deadline.
@pytest.mark.parametrize("bug", [ValueError("secret detail"), TimeoutError("secret detail")])
async def test_an_unexpected_exception_is_an_error_response_without_its_details(
    bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The details are only logged. The next call is handled as usual."""
    rig = _Rig()
    rig.fail(bug)
    error = await rig.fails("StartContainer", pb.StartContainerRequest(**_BOTH))
    assert (error.code, rig.observer.calls) == (Code.INTERNAL, [("StartContainer", "error")])
    assert "secret" not in error.message
    assert "secret detail" in caplog.text
    rig.hooks.before = None
    assert await rig.call("StartContainer", pb.StartContainerRequest(**_BOTH)) == b""


# The call's timeout in seconds, Configure's timeout in milliseconds, and the hook's deadline in seconds.
@pytest.mark.parametrize(
    ("in_call", "configured", "deadline"), [(4.0, 0, 3), (0.0, 8000, 6), (4.0, 8000, 3), (0.0, 0, 1.5)]
)
async def test_a_hook_is_answered_with_an_error_before_the_runtimes_timeout(
    in_call: float, configured: int, deadline: float
) -> None:
    """Without a response, the runtime would disconnect the plugin and start the container without enforcement."""
    rig = _Rig()

    async def never(_hook: str) -> None:
        await asyncio.Event().wait()

    rig.hooks.before = never
    await rig.call("Configure", pb.ConfigureRequest(request_timeout=configured))
    error = await rig.fails("CreateContainer", pb.CreateContainerRequest(**_BOTH), in_call)
    assert (error.code, error.message) == (4, f"CreateContainer did not finish within {deadline} s; it will be retried")
    assert rig.observer.calls[-1] == ("CreateContainer", "timeout")


async def test_a_request_that_cannot_be_decoded_is_an_invalid_argument() -> None:
    with pytest.raises(StatusError) as caught:
        await _Rig().service.serve(Call(PLUGIN_SERVICE, "CreateContainer", b"\xff\xff"))
    assert caught.value.code == Code.INVALID_ARGUMENT
