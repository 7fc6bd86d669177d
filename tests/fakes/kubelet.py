# SPDX-License-Identifier: Apache-2.0
"""A fake kubelet with the parts that a DRA driver uses. It is independent of this project and works with any driver.

``python -m tests.fakes.kubelet --root DIR --control SOCK`` runs it as a process that accepts calls().
"""

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from tests.fakes._pb import dra_v1_pb2, dra_v1_pb2_grpc, dra_v1beta1_pb2, dra_v1beta1_pb2_grpc
from tests.fakes.control import Calls, serve, stopping
from tests.fakes.kubelet_claims import (
    CachedClaim,
    CachedDevice,
    ClaimCache,
    Document,
    DriverCall,
    PrepareError,
    UnprepareError,
    container_devices,
)
from tests.fakes.kubelet_plugins import Endpoint, KubeletSettings, Plugins

_VERSIONS: dict[str, tuple[Any, Any]] = {
    "v1.DRAPlugin": (dra_v1_pb2, dra_v1_pb2_grpc.DRAPluginStub),
    "v1beta1.DRAPlugin": (dra_v1beta1_pb2, dra_v1beta1_pb2_grpc.DRAPluginStub),
}
"""Message types and stub for each version of the service."""


class Kubelet:
    """The kubelet, used with ``async with``. Unlike the real kubelet, it does not delete a removed driver's slices;
    tests do that in the API server.
    """

    def __init__(self, root: Path, settings: KubeletSettings | None = None) -> None:
        self.root = root
        self.settings = settings or KubeletSettings()
        self.plugins = Plugins(root / "plugins_registry", self.settings)
        self.cache = ClaimCache(root / "dra_manager_state")
        self.calls: list[DriverCall] = []
        """Every answered prepare and unprepare call, with its duration."""
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.plugins.registry.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.cache.load()
        self._watch = asyncio.create_task(self.plugins.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None

    async def restart(self) -> None:
        """Restarts the kubelet: connections are closed and the checkpoint is read."""
        await self.__aexit__(None, None, None)
        await self.__aenter__()

    async def driver(self, name: str, within: float = 10.0) -> Endpoint:
        """Returns the driver's endpoint once it is registered and connected. Raises TimeoutError."""
        async with asyncio.timeout(within):
            # No event reports that a channel has connected, so its state is polled.
            while (endpoint := self.plugins.endpoint(name)) is None or not endpoint.connected():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return endpoint

    async def prepare_pod(self, pod: Document, claims: Sequence[Document]) -> dict[str, list[str]]:
        """Prepares the claims of a pod and returns the CDI ids of each container. Raises PrepareError."""
        admitted = [self.cache.admit(pod, claim) for claim in claims]
        for name in {driver for claim in admitted for driver in claim.drivers}:
            if self.plugins.endpoint(name) is None:
                raise PrepareError(f"DRA driver {name} is not registered")
        for claim in admitted:
            self.cache.claims[claim.namespace, claim.name] = claim
            if pod["metadata"]["uid"] not in claim.pods:
                claim.pods.append(pod["metadata"]["uid"])
        self.cache.save()
        fresh = [claim for claim in admitted if not claim.prepared]
        for name in _any_order(fresh):
            await self._prepare(name, [claim for claim in fresh if name in claim.drivers])
        for claim in fresh:
            claim.prepared = True
        self.cache.save()
        return container_devices(pod, claims, self.cache.claims)

    async def unprepare_pod(self, pod_uid: str) -> None:
        """Ends a pod's use of its claims and unprepares the claims that no other pod uses. Raises UnprepareError."""
        ending: list[CachedClaim] = []
        for claim in self.cache.of_pod(pod_uid):
            if claim.pods == [pod_uid]:
                ending.append(claim)
            else:
                claim.pods.remove(pod_uid)
        for name in _any_order(ending):
            await self._call(name, "Unprepare", [claim for claim in ending if name in claim.drivers], UnprepareError)
        for claim in ending:
            del self.cache.claims[claim.namespace, claim.name]
        self.cache.save()

    async def _prepare(self, driver: str, claims: list[CachedClaim]) -> None:
        by_uid = {claim.uid: claim for claim in claims}
        for uid, entry in (await self._call(driver, "Prepare", claims, PrepareError)).items():
            # The ids are appended to those in the checkpoint, so ids that change over time accumulate.
            by_uid[uid].devices.setdefault(driver, []).extend(_cached(device) for device in entry.devices)

    async def _call(
        self, driver: str, verb: str, claims: list[CachedClaim], failure: type[Exception]
    ) -> Mapping[str, Any]:
        endpoint = self.plugins.endpoint(driver)
        if endpoint is None:
            raise failure(f"DRA driver {driver} is not registered")
        (messages, stub), method = _VERSIONS[endpoint.service], f"Node{verb}Resources"
        request = getattr(messages, f"{method}Request")()
        for claim in claims:
            request.claims.add(namespace=claim.namespace, name=claim.name, uid=claim.uid)
        call = getattr(stub(endpoint.channel), method)
        began = time.perf_counter()
        try:
            answers = (await call(request, timeout=self.settings.call)).claims
        except grpc.aio.AioRpcError as error:
            raise failure(f"{driver} {method}: {error.code().name}: {error.details()}") from error
        except asyncio.CancelledError:
            if endpoint in self.plugins.endpoints:
                raise
            raise failure(f"{driver} {method}: its connection was closed") from None
        self.calls.append(DriverCall(driver, method, len(claims), time.perf_counter() - began))
        names = {claim.uid: claim.name for claim in claims}
        for uid, entry in answers.items():
            if uid not in names:
                raise failure(f"{driver} returned a claim that was not in the request: {uid}")
            if entry.error:
                raise failure(f"{driver} failed to {verb.lower()} claim {names[uid]}: {entry.error}")
        if len(answers) < len(claims):
            raise failure(f"{driver} skipped {len(claims) - len(answers)} ResourceClaims")
        return dict(answers)


def _any_order(claims: Sequence[CachedClaim]) -> list[str]:
    drivers = sorted({driver for claim in claims for driver in claim.drivers})
    random.shuffle(drivers)  # random, because the real kubelet iterates over a Go map
    return drivers


def _cached(device: Any) -> CachedDevice:
    share = device.share_id if "share_id" in device.DESCRIPTOR.fields_by_name and device.HasField("share_id") else None
    return CachedDevice(
        list(device.request_names), device.pool_name, device.device_name, list(device.cdi_device_ids), share
    )


def calls(kubelet: Kubelet) -> Calls:
    """Returns the calls that the control socket accepts."""

    async def status() -> Document:
        return {"endpoints": [_shown(one) for one in kubelet.plugins.endpoints]}

    async def health() -> list[Document]:
        return [
            {"driver": driver, "pool": pool, "device": device, "health": seen.health, "message": seen.message}
            for driver, devices in kubelet.plugins.health.items()
            for (pool, device), seen in devices.items()
        ]

    async def made() -> list[Document]:
        return [asdict(call) for call in kubelet.calls]

    operations: Calls = {"restart": kubelet.restart, "prepare": kubelet.prepare_pod, "unprepare": kubelet.unprepare_pod}
    return {"status": status, "health": health, "calls": made, **operations}


def _shown(one: Endpoint) -> Document:
    return {"driver": one.driver, "path": one.path, "connected": one.connected()}


async def _main() -> None:
    parser = argparse.ArgumentParser(description="The part of a kubelet that a DRA driver sees.")
    parser.add_argument("--root", type=Path, required=True, help="the kubelet's root directory")
    parser.add_argument("--control", type=Path, required=True, help="unix socket for calls as JSON lines")
    parser.add_argument(
        "--poll-seconds", type=float, default=0.05, help="time between two scans of the plugin registry"
    )
    arguments = parser.parse_args()
    stop = stopping()
    kubelet = Kubelet(arguments.root, KubeletSettings(poll=arguments.poll_seconds))
    async with kubelet, serve(arguments.control, calls(kubelet), PrepareError, UnprepareError):
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(_main())
