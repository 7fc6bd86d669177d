# SPDX-License-Identifier: Apache-2.0
"""The selectors of the DeviceClasses, evaluated as CEL on devices as the scheduler represents them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cel
import pytest
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import HugepagePool, NumaNode
from numa_contract.config import Config
from numa_tools.cel.evaluate import selected
from numa_tools.cel.values import CelError, Domains
from numa_tools.commands.classes import device_classes

from tests.chart.helm import Document
from tests.rigs.trees import small_machine

FOUND = discover(small_machine())
FAR = NumaNode(2, frozenset(), 8 << 30, (HugepagePool(2 << 20, 64, 64), HugepagePool(1 << 30, 0, 0)), {0: 24, 1: 17})
MACHINE = replace(FOUND, numa_nodes={**FOUND.numa_nodes, 2: FAR})
DOMAINS = ("resource.kubernetes.io", "dra.cpu", "dra.net", "dra.memory")


def presented(driver: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns a device as the scheduler represents it: attributes grouped by domain, and an empty map for any other
    domain.
    """
    domains: dict[str, Any] = {domain: {} for domain in DOMAINS}
    for name, value in attributes.items():
        domain, _, short = name.rpartition("/")
        domains[domain or driver][short] = next(iter(value.values()))
    return {"device": {"driver": driver, "attributes": domains}}


def classes_of(device: dict[str, Any]) -> list[str]:
    """Returns the classes that a device belongs to."""
    return [
        document["metadata"]["name"]
        for document in device_classes(MACHINE)
        if all(cel.evaluate(selector["cel"]["expression"], device) for selector in document["spec"]["selectors"])
    ]


def test_each_device_has_the_class_of_its_kind() -> None:
    """The kinds are CPUs, plain memory and each page size; memory and pages on nodes without CPUs have separate "far"
    classes. No device is in two classes, and no selector reads a missing attribute. Other drivers' devices do not match
    any class.
    """
    pools = build_inventory(MACHINE, Config(), "n").pools
    slices: list[Document] = [document for pool in pools for document in slice_documents(pool, "n")]
    found = {
        device["name"]: classes_of(presented(document["spec"]["driver"], device["attributes"]))
        for document in slices
        for device in document["spec"]["devices"]
    }
    assert classes_of(presented("gpu.example.com", {})) == []
    assert found == {
        "cpudevnuma000": ["dra.cpu"],
        "cpudevnuma001": ["dra.cpu"],
        "memory-numa000": ["dra.memory"],
        "memory-numa001": ["dra.memory"],
        "memory-numa002": ["dra.memory-far"],
        "hugepages-2m-numa000": ["dra.hugepages-2m"],
        "hugepages-2m-numa001": ["dra.hugepages-2m"],
        "hugepages-2m-numa002": ["dra.hugepages-2m-far"],
        "hugepages-1g-numa001": ["dra.hugepages-1g"],
    }


@pytest.mark.parametrize(
    "expression",
    [
        'device.attributes["dra.cpu"].numCPUs > 3 && device.driver == "dra.cpu"',
        'device.attributes["dra.cpu"].missing == 1 || device.driver == "dra.cpu"',
        'device.driver != "dra.cpu" && device.attributes["dra.cpu"].missing == 1',
        'device.attributes["dra.cpu"].missing == 1 || device.driver != "dra.cpu"',
        'has(device.attributes["dra.cpu"].numCPUs) ? -7 / 2 == -3 : false',
        "-7 % 4 == -3 && 2 + 3 * 4 == 14 && (2 + 3) * 4 == 20 && 10 - 3 - 2 == 5",
        '"numaNode" in device.attributes["resource.kubernetes.io"] && !(device.driver in ["a", "b"])',
        'device.attributes["dra.cpu"].numCPUs == "8"',
        'device.attributes["dra.cpu"].numCPUs < "8"',
        'device.driver.startsWith("dra") && device.driver.endsWith(".cpu") && device.driver.contains("a.c")',
        "size(device.driver) == 7 && size([1, 2]) == 2 && [1, 2][1] == 2 && [1, 2][2] == 2",
        "1 / 0 == 1 || true",
        "!device.driver || true",
        'true ? "x" == "x" : 1 / 0 == 1',
        "device.driver",
    ],
)
def test_both_cel_implementations_agree(expression: str) -> None:
    """The tests contain two CEL implementations. An expression has the same result in both: true, false, or an
    error.
    """
    attributes = {"numCPUs": {"int": 8}, "resource.kubernetes.io/numaNode": {"int": 0}}
    device = presented("dra.cpu", attributes)
    mine = {**device["device"], "attributes": Domains(device["device"]["attributes"])}
    assert _outcome(lambda: selected(expression, mine)) == _outcome(lambda: cel.evaluate(expression, device))


def _outcome(evaluate: Callable[[], Any]) -> bool | None:
    """Returns true or false, or None for an error and for any other value."""
    try:
        found = evaluate()
    except (CelError, ValueError, TypeError, LookupError, RuntimeError):
        return None
    return found if isinstance(found, bool) else None
