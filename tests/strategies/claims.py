# SPDX-License-Identifier: Apache-2.0
"""ResourceClaim documents as the scheduler leaves them."""

from collections.abc import Sequence
from typing import Any

NODE = "node-a"


def result(request: str, driver: str, device: str, pool: str = "", **more: Any) -> dict[str, Any]:
    """Returns one entry of the allocation's results."""
    return {"request": request, "driver": driver, "device": device, "pool": pool or NODE, **more}


def cpus(count: int | str, request: str = "cpus", device: str = "cpudevnuma000") -> dict[str, Any]:
    """Returns a result that takes CPUs."""
    return result(request, "dra.cpu", device, consumedCapacity={"dra.cpu/cpu": str(count)}, shareID=f"share-{request}")


def memory(size: str, request: str = "memory", node: int = 0, kind: str = "memory") -> dict[str, Any]:
    """Returns a result that takes memory, or hugepages when ``kind`` is ``hugepages-2m``."""
    device = f"{kind}-numa{node:03d}"
    return result(request, "dra.memory", device, f"{NODE}-{kind}", consumedCapacity={"size": size})


def opaque(fields: dict[str, Any], *requests: str, from_class: bool = False, driver: str = "dra.cpu") -> dict[str, Any]:
    """Returns an entry of the allocation's config: the fields of ``cpuConfig``, for some requests or for all."""
    return _config({"cpuConfig": fields}, requests, driver, from_class=from_class)


def memory_opaque(fields: dict[str, Any], *requests: str, from_class: bool = False) -> dict[str, Any]:
    """Returns an entry of the allocation's config: the fields of ``memoryConfig``, for some requests or for all."""
    return _config({"memoryConfig": fields}, requests, "dra.memory", from_class=from_class)


def _config(section: dict[str, Any], requests: Sequence[str], driver: str, *, from_class: bool) -> dict[str, Any]:
    return {
        "source": "FromClass" if from_class else "FromClaim",
        "requests": list(requests),
        "opaque": {"driver": driver, "parameters": {"apiVersion": "v1alpha1", **section}},
    }


def claim(
    uid: str,
    *results: dict[str, Any],
    pods: tuple[str, ...] = ("pod-1",),
    name: str = "",
    namespace: str = "ns",
    config: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Returns an allocated claim, reserved for pods by UID."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"uid": uid, "namespace": namespace, "name": name or f"claim-{uid}"},
        "status": {
            "allocation": {
                "devices": {"results": list(results), "config": list(config)},
                "nodeSelector": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
                    ]
                },
            },
            "reservedFor": [{"resource": "pods", "name": f"name-{pod}", "uid": pod} for pod in pods],
        },
    }
