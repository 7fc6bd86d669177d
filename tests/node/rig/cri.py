# SPDX-License-Identifier: Apache-2.0
"""A client for the Container Runtime Interface, which calls containerd over the same socket as the kubelet."""

import json
from dataclasses import dataclass
from typing import Any

import grpc

from tests.fakes.waiting import PATIENCE
from tests.node._pb import cri_pb2 as pb
from tests.node._pb import cri_pb2_grpc

SOCKET = "unix:///run/containerd/containerd.sock"
CALL_LIMIT = 60.0 * PATIENCE  # seconds; the runtime itself cuts off a hook that hangs (2 s)


class CriError(Exception):
    """The runtime rejected a call. `code` is the name of the gRPC status."""

    def __init__(self, method: str, code: str, details: str) -> None:
        super().__init__(f"{method}: {code}: {details}")
        self.method = method
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command inside a container."""

    out: str
    err: str
    code: int


class Runtime:
    """A connection to the runtime; it reconnects by itself when containerd restarts."""

    def __init__(self, address: str = SOCKET) -> None:
        # After a restart of containerd the default backoff (up to two minutes) would be longer than a test.
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub: Any = cri_pb2_grpc.RuntimeServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def call(self, request: Any, limit: float = CALL_LIMIT) -> Any:
        """Calls the CRI method with this request type. Raises CriError if the runtime rejects the call."""
        method = str(request.DESCRIPTOR.name).removesuffix("Request")
        try:
            return getattr(self._stub, method)(request, timeout=limit, wait_for_ready=True)
        except grpc.RpcError as error:
            raise CriError(method, error.code().name, error.details() or "") from error

    def version(self) -> tuple[str, str]:
        """Returns the runtime's name and version."""
        answer = self.call(pb.VersionRequest(version="v1"))
        return answer.runtime_name, answer.runtime_version

    def is_ready(self) -> bool:
        """Returns True if the runtime has finished starting; until then, every call fails with UNAVAILABLE."""
        try:
            self.version()
        except CriError as error:
            if error.code != "UNAVAILABLE":
                raise
            return False
        return True

    def run_pod(self, config: pb.PodSandboxConfig) -> str:
        return str(self.call(pb.RunPodSandboxRequest(config=config)).pod_sandbox_id)

    def remove_pod(self, sandbox: str) -> None:
        """Stops the sandbox with all its containers and removes it."""
        self.call(pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        self.call(pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))

    def pods(self) -> list[str]:
        return [item.id for item in self.call(pb.ListPodSandboxRequest()).items]

    def create(self, sandbox: str, config: pb.ContainerConfig, pod: pb.PodSandboxConfig) -> str:
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=config, sandbox_config=pod)
        return str(self.call(request).container_id)

    def start(self, container: str) -> None:
        self.call(pb.StartContainerRequest(container_id=container))

    def stop(self, container: str, grace: int = 0) -> None:
        """Stops a container; `grace` seconds pass between SIGTERM and SIGKILL, and 0 means SIGKILL immediately."""
        self.call(pb.StopContainerRequest(container_id=container, timeout=grace))

    def remove(self, container: str) -> None:
        self.call(pb.RemoveContainerRequest(container_id=container))

    def update(self, container: str, resources: pb.LinuxContainerResources) -> None:
        """Updates resources as the kubelet's in-place resize does."""
        self.call(pb.UpdateContainerResourcesRequest(container_id=container, linux=resources))

    def state(self, container: str) -> pb.ContainerStatus:
        request = pb.ContainerStatusRequest(container_id=container)
        status: pb.ContainerStatus = self.call(request).status
        return status

    def pid(self, container: str) -> int:
        """Returns the pid of the container's first process from the runtime's verbose status, or 0 before it starts and
        after it exits.
        """
        answer = self.call(pb.ContainerStatusRequest(container_id=container, verbose=True))
        return int(json.loads(answer.info["info"]).get("pid") or 0)

    def exec(self, container: str, command: list[str], limit: int = 60) -> ExecResult:
        """Runs a command inside a container and waits at most `limit` seconds for it to exit."""
        limit = int(limit * PATIENCE)
        request = pb.ExecSyncRequest(container_id=container, cmd=command, timeout=limit)
        answer = self.call(request, limit=limit + 10.0)
        return ExecResult(answer.stdout.decode(), answer.stderr.decode(), answer.exit_code)
