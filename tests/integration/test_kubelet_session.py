# SPDX-License-Identifier: Apache-2.0
"""The driver's plugins with a fake kubelet: registration, pods that start and end, older kubelets, health."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.kubelet.dra import ClaimName, ClaimResult, PreparedDevice
from dra_frontend.kubelet.health import DeviceHealth, Health, HealthBoard
from dra_frontend.kubelet.plugin import KubeletPlugin, PluginPaths

from tests.fakes.kubelet import Kubelet
from tests.fakes.kubelet_plugins import KubeletSettings
from tests.fakes.waiting import PATIENCE, eventually
from tests.rigs import builders as claims

QUICK = KubeletSettings(poll=0.02, backoff=0.05, health_retry=0.05)
OLD = "0c7d6f4e-8a0c-4b69-9f86-1f1f3f0b9f11"


class Door:
    """A fake service that prepares each of a claim's requests with the device of the same name."""

    def __init__(self, *requests: str) -> None:
        self.requests = requests
        self.calls: list[tuple[str, str, list[str]]] = []

    async def prepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, ClaimResult]:
        self.calls.append(("prepare", driver, [claim.uid for claim in claims]))
        return {claim.uid: self._answer(driver, claim) for claim in claims}

    def _answer(self, driver: str, claim: ClaimName) -> ClaimResult:
        return ClaimResult(
            tuple(
                PreparedDevice(request, "node", request, (f"{driver}/x={claim.uid}-{request}",), f"share-{request}")
                for request in self.requests
            )
        )

    async def unprepare(self, driver: str, claims: Sequence[ClaimName]) -> Mapping[str, ClaimResult]:
        self.calls.append(("unprepare", driver, [claim.uid for claim in claims]))
        return {claim.uid: ClaimResult() for claim in claims}


def claim(uid: str, *drivers: str, pods: Sequence[str] = ("pod-a",)) -> dict[str, Any]:
    results = [claims.result("r", driver, "d") for driver in drivers]
    return claims.claim(uid, *results, pods=tuple(pods), namespace="default")


def pod(uid: str, claims: Sequence[str], **containers: Sequence[dict[str, str]]) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "default", "name": uid, "uid": uid},
        "spec": {
            "resourceClaims": [{"name": name, "resourceClaimName": f"claim-{name}"} for name in claims],
            "containers": [{"name": name, "resources": {"claims": uses}} for name, uses in containers.items()],
        },
    }


@asynccontextmanager
async def plugged(root: Path, door: Door) -> AsyncIterator[Kubelet]:
    """Yields a kubelet with one registered plugin."""
    plugin = KubeletPlugin("dra.cpu", door, PluginPaths.under(root, "dra.cpu", OLD))
    async with Kubelet(root, QUICK) as kubelet, plugin:
        await plugin.register()
        await kubelet.driver("dra.cpu")
        yield kubelet


async def test_two_drivers_of_one_process_serve_a_pod(short_root: Path) -> None:
    """Both drivers register with v1 and prepare a claim with devices from both, and each container gets the devices
    that it names.
    """
    door = Door("cpus", "mem")
    cpu = KubeletPlugin("dra.cpu", door, PluginPaths.under(short_root, "dra.cpu", OLD))
    memory = KubeletPlugin("dra.memory", door, PluginPaths.under(short_root, "dra.memory", OLD))
    async with Kubelet(short_root, QUICK) as kubelet, cpu, memory:
        for plugin in (cpu, memory):
            await plugin.register()
        for driver in ("dra.cpu", "dra.memory"):
            assert (await kubelet.driver(driver)).service == "v1.DRAPlugin"
        await eventually(lambda: cpu.registered and memory.registered)
        given = await kubelet.prepare_pod(
            pod("pod-a", ["u"], all=[{"name": "u"}], part=[{"name": "u", "request": "cpus"}], none=[]),
            [claim("u", "dra.cpu", "dra.memory")],
        )
        assert sorted(given["part"]) == ["dra.cpu/x=u-cpus", "dra.memory/x=u-cpus"]
        assert len(given["all"]) == 4
        assert given["none"] == []
        (cached,) = kubelet.cache.of_pod("pod-a")
        assert cached.devices["dra.cpu"][0].share_id == "share-cpus"
        await kubelet.unprepare_pod("pod-a")
        assert not kubelet.cache.claims
    assert sorted(door.calls) == [
        (call, driver, ["u"]) for call in ("prepare", "unprepare") for driver in ("dra.cpu", "dra.memory")
    ]


async def test_the_kubelet_does_not_call_the_driver_for_the_second_pod_of_a_claim(short_root: Path) -> None:
    """The kubelet calls the driver for the first pod and after the last one; both pods get the same ids."""
    door = Door("r")
    shared = claim("u", "dra.cpu", pods=["pod-a", "pod-b"])
    async with plugged(short_root, door) as kubelet:
        first = await kubelet.prepare_pod(pod("pod-a", ["u"], c=[{"name": "u"}]), [shared])
        assert await kubelet.prepare_pod(pod("pod-b", ["u"], c=[{"name": "u"}]), [shared]) == first
        await kubelet.unprepare_pod("pod-a")
        assert [call for call, _, _ in door.calls] == ["prepare"]
        await kubelet.unprepare_pod("pod-b")
    assert [call for call, _, _ in door.calls] == ["prepare", "unprepare"]


async def test_a_kubelet_that_supports_only_v1beta1_is_served(short_root: Path) -> None:
    """The version is chosen once, at registration; v1beta1 works without share ids."""
    plugin = KubeletPlugin("dra.cpu", Door("r"), PluginPaths.under(short_root, "dra.cpu", OLD))
    async with Kubelet(short_root, KubeletSettings(poll=0.02, services=("v1beta1.DRAPlugin",))) as kubelet, plugin:
        await plugin.register()
        assert (await kubelet.driver("dra.cpu")).service == "v1beta1.DRAPlugin"
        given = await kubelet.prepare_pod(pod("pod-a", ["u"], c=[{"name": "u"}]), [claim("u", "dra.cpu")])
        assert given == {"c": ["dra.cpu/x=u-r"]}
        assert kubelet.cache.of_pod("pod-a")[0].devices["dra.cpu"][0].share_id is None


async def test_a_failed_registration_is_reported_and_retried(short_root: Path) -> None:
    """If the kubelet supports none of the plugin's services, it rejects the registration; the plugin reports the reason
    and keeps running.
    """
    plugin = KubeletPlugin("dra.cpu", Door("r"), PluginPaths.under(short_root, "dra.cpu", OLD))
    async with (
        Kubelet(short_root, KubeletSettings(poll=0.02, backoff=0.02, services=("v2.DRAPlugin",))) as kubelet,
        plugin,
    ):
        await plugin.register()
        await eventually(lambda: any(len(texts) > 1 for texts in kubelet.plugins.failures.values()))
        assert not plugin.registered
        assert "is supported" in plugin.error


@pytest.mark.parametrize("service", ["v1alpha1", "v1beta1", "v1"])
async def test_the_health_stream_reaches_the_kubelet_and_ends_at_shutdown(short_root: Path, service: str) -> None:
    """In each of its versions, the health API streams the complete list and its changes, and the stream ends cleanly at
    shutdown.
    """
    good = DeviceHealth("node", "d0", Health.HEALTHY)
    board = HealthBoard([good, DeviceHealth("node", "d1", Health.HEALTHY)])
    plugin = KubeletPlugin("dra.cpu", Door("r"), PluginPaths.under(short_root, "dra.cpu", OLD), board, grace_seconds=60)
    settings = KubeletSettings(poll=0.02, health_retry=0.05, health_service=f"{service}.DRAResourceHealth")
    async with Kubelet(short_root, settings) as kubelet:
        async with asyncio.timeout(15 * PATIENCE), plugin:
            await plugin.register()
            await eventually(lambda: kubelet.plugins.device_health("dra.cpu", "node", "d1") == "HEALTHY")
            board.update([good, DeviceHealth("node", "d1", Health.UNHEALTHY, "CPU 3 is offline")])
            await eventually(lambda: kubelet.plugins.device_health("dra.cpu", "node", "d1") == "UNHEALTHY")
            assert kubelet.plugins.device_health("dra.cpu", "node", "d0") == "HEALTHY"
            assert kubelet.plugins.health["dra.cpu"]["node", "d1"].message == "CPU 3 is offline"
        await eventually(lambda: kubelet.plugins.device_health("dra.cpu", "node", "d0") == "UNKNOWN")
