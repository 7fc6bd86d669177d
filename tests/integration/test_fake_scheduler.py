# SPDX-License-Identifier: Apache-2.0
"""The fake scheduler must allocate like the real one; otherwise the demo and the tests would prepare claims that never
occur in practice.
"""

from typing import Any

import pytest

from tests.fakes.scheduler import UnschedulableError, allocate
from tests.fakes.scheduler_devices import Document


def device(name: str, key: str, value: str, step: str) -> Document:
    policy = {"default": step, "validRange": {"min": step, "step": step, "max": value}}
    return {
        "name": name,
        "capacity": {key: {"value": value, "requestPolicy": policy}},
        "allowMultipleAllocations": True,
    }


def a_slice(driver: str, pool: str, *devices: Document, generation: int = 1, count: int = 1) -> Document:
    header = {"name": pool, "generation": generation, "resourceSliceCount": count}
    spec = {"driver": driver, "nodeName": "node-a", "pool": header, "devices": list(devices)}
    return {"metadata": {"name": f"00000-{driver}-{pool}-{generation}"}, "spec": spec}


CPU = device("a", "cpu", "8", "1")
TAINTED = {**CPU, "taints": [{"key": "k", "effect": "NoSchedule"}]}
PUBLISHED = [
    a_slice("cpu.example", "node-a", device("cpu0", "cpu", "8", "1"), device("cpu1", "cpu", "8", "1")),
    a_slice("mem.example", "mem", device("mem0", "size", "8Gi", "4Ki")),
]


def a_class(driver: str, *config: Document) -> Document:
    return {"spec": {"selectors": [{"cel": {"expression": f'device.driver == "{driver}"'}}], "config": [*config]}}


OPAQUE = {"opaque": {"driver": "cpu.example", "parameters": {"a": 1}}}
CLASSES = {"cpu": a_class("cpu.example", OPAQUE), "mem": a_class("mem.example")}


def request(name: str, **amounts: str) -> Document:
    return {"name": name, "exactly": {"deviceClassName": name, "capacity": {"requests": amounts}}}


def claim(*requests: Document, **more: Any) -> Document:
    return {
        "metadata": {"name": "c", "namespace": "default"},
        "spec": {"devices": {"requests": list(requests), **more}},
    }


def results(allocated: Document) -> list[tuple[str, str, Any]]:
    return [
        (one["request"], one["device"], one.get("consumedCapacity"))
        for one in allocated["status"]["allocation"]["devices"]["results"]
    ]


@pytest.mark.parametrize(("asked", "given"), [("100m", "1"), ("1500m", "2"), ("8", "8")])
def test_requests_are_rounded_up_to_the_valid_range(asked: str, given: str) -> None:
    """Requests are raised to min and then to the next step, and printed with binary suffixes."""
    assert results(allocate(claim(request("cpu", cpu=asked)), PUBLISHED, CLASSES)) == [("cpu", "cpu0", {"cpu": given})]
    assert results(allocate(claim(request("mem", size="8000")), PUBLISHED, CLASSES))[0][2] == {"size": "8Ki"}


def test_capacity_is_shared_until_it_is_used_up() -> None:
    """The shares of other claims are subtracted from a device's capacity. A request that does not fit is allocated on
    the next device; if no device is left, it fails.
    """
    first = allocate(claim(request("cpu", cpu="6")), PUBLISHED, CLASSES)
    second = allocate(claim(request("cpu", cpu="6")), PUBLISHED, CLASSES, others=[first])
    third = allocate(claim(request("cpu", cpu="2")), PUBLISHED, CLASSES, others=[first, second])
    assert [results(one)[0][1] for one in (first, second, third)] == ["cpu0", "cpu1", "cpu0"]
    with pytest.raises(UnschedulableError, match="requests cpu of claim c"):
        allocate(claim(request("cpu", cpu="3")), PUBLISHED, CLASSES, others=[first, second, third])


def test_capacity_keys_are_matched_literally() -> None:
    """A request fails if no device has exactly the capacity key that it names."""
    with pytest.raises(UnschedulableError):
        allocate(claim(request("cpu", **{"cpu.example/cpu": "1"})), PUBLISHED, CLASSES)


def test_a_count_allocates_several_devices() -> None:
    """Each device has the requested amount."""
    two = {"name": "cpu", "exactly": {"deviceClassName": "cpu", "count": 2, "capacity": {"requests": {"cpu": "5"}}}}
    assert [one[1] for one in results(allocate(claim(two), PUBLISHED, CLASSES))] == ["cpu0", "cpu1"]


def test_class_configuration_comes_first() -> None:
    """FromClass entries precede FromClaim entries and name the request to which they apply."""
    mine = {"requests": ["cpu"], "opaque": {"driver": "cpu.example", "parameters": {"a": 2}}}
    allocated = allocate(claim(request("cpu"), config=[mine]), PUBLISHED, CLASSES)
    assert allocated["status"]["allocation"]["devices"]["config"] == [
        {"source": "FromClass", "requests": ["cpu"], **OPAQUE},
        {"source": "FromClaim", **mine},
    ]


@pytest.mark.parametrize(
    "published",
    [
        pytest.param([a_slice("cpu.example", "p", CPU, count=2)], id="incomplete"),
        pytest.param([a_slice("cpu.example", "p", CPU, CPU)], id="duplicate"),
        pytest.param([a_slice("cpu.example", "p", CPU), a_slice("cpu.example", "p", generation=2)], id="obsolete"),
        pytest.param([a_slice("cpu.example", "p", TAINTED)], id="tainted"),
    ],
)
def test_devices_of_unusable_pools_are_ignored(published: list[Document]) -> None:
    """An incomplete, duplicated, obsolete or tainted pool offers no devices, and no error is reported."""
    with pytest.raises(UnschedulableError):
        allocate(claim(request("cpu")), published, CLASSES)
