# SPDX-License-Identifier: Apache-2.0
"""How long the decision of a prepare takes: 10,000 pairs on 512 CPUs, and whether the time grows with the CPUs alone.

Everything between the claim document and the record is in it: reading, parameters, allocator, record. Files are not.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from dra_frontend.cpu_groups import DeviceKind
from dra_frontend.inventory import CpuDevice, Inventory, build_inventory
from dra_frontend.simulate import NODE, Operation, Prepare, Request, Simulation, Unprepare
from numa_contract.config import Config

from tests.strategies.machines import assemble, even_cores

PAIRS: Final = 10_000
LIMIT_MS: Final = 2.0
_LIVE_CLAIMS: Final = 48
_AMOUNTS: Final = (1, 2, 2, 4, 4, 6, 8, 16)
_WISHES: Final[Sequence[dict[str, Any] | None]] = (
    None,
    None,
    {"fullPhysicalCores": True},
    {"strategy": "spread"},
    {"l3": "required"},
    {"numa": "distribute"},
)


def node(cpus: int, group_by: str) -> Inventory:
    """Returns two sockets of two threads per core and eight cores per L3, with so many CPUs in all."""
    return build_inventory(
        assemble(even_cores(2, 2, cpus // 64, 8, 2)), Config.model_validate({"groupBy": group_by}), NODE
    )


def prepares(inventory: Inventory, pairs: int = PAIRS, seed: int = 1) -> list[float]:
    """Returns the seconds of each of so many prepares, while up to 48 claims come and go."""
    choice = random.Random(seed)
    devices = [device.name for device in inventory.pools[0].devices if isinstance(device, CpuDevice)]
    simulation = Simulation(inventory)
    live: list[str] = []
    seconds: list[float] = []
    for number in range(pairs):
        if len(live) >= min(_LIVE_CLAIMS, len(inventory.machine.cpus) // 10):
            gone = live.pop(choice.randrange(len(live)))
            simulation.run(Operation(unprepare=Unprepare(uid=gone)))
        wish = choice.choice(_WISHES)
        request = Request(device=choice.choice(devices), cpus=choice.choice(_AMOUNTS), parameters=wish)
        claim = Prepare(uid=f"claim-{number}", requests=[request])
        began = time.perf_counter()
        simulation.prepare(claim)
        seconds.append(time.perf_counter() - began)
        live.append(claim.uid)
    return seconds


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Returns median and 99th percentile."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1000, 3), "p99_ms": round(cuts[98] * 1000, 3)}


def growth(pairs: int = 500) -> dict[int, float]:
    """Returns the median of a prepare on the whole machine by the number of its CPUs, in milliseconds."""
    return {
        cpus: round(statistics.median(prepares(node(cpus, DeviceKind.MACHINE), pairs)) * 1000, 3)
        for cpus in (128, 256, 512)
    }


def measure(pairs: int = PAIRS) -> dict[str, Any]:
    """Returns all figures."""
    grown = growth()
    return {
        "pairs": pairs,
        "cpus": 512,
        "by_numa_node": milliseconds(prepares(node(512, DeviceKind.NUMA_NODE), pairs)),
        "machine": milliseconds(prepares(node(512, DeviceKind.MACHINE), pairs)),
        "median_ms_by_cpus": grown,
        "growth_128_to_512": round(grown[512] / grown[128], 2),
        "limit_p99_ms": LIMIT_MS,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="prepare/unprepare pairs (10000)")
    print(json.dumps(measure(parser.parse_args().pairs), indent=2))
