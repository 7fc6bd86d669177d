# SPDX-License-Identifier: Apache-2.0
"""Measures allocation during Prepare: 10,000 allocations, each followed by its release, on 512 CPUs, and how the time
grows with the number of CPUs.

The measured time covers everything from the claim document to the record: parsing, parameters, allocation and
construction of the record, but no file access. This code never blocks, so CPU time is measured instead of elapsed time.
CPU time is valid even on a busy machine.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from dra_frontend.allocation.allocate import allocate_claim, parse_driver_claim
from dra_frontend.allocation.claim import RefusedError, parse_claim
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.model import CpuDevice, DeviceKind
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import CPU_DRIVER, ClaimKey

from tests.bench import quantities
from tests.bench.figures import Quantity
from tests.rigs import builders
from tests.strategies.machines import assemble, even_cores

_CONFIG: Final = Config()
_P99_BUDGET: Final = 2.0
_CPUS: Final = 512
_SMALLEST: Final = 128
_LIVE_CLAIMS: Final = 48
_LOAD: Final = f"{_LIVE_CLAIMS} claims, no containers"
_AMOUNTS: Final = (1, 2, 2, 4, 4, 6, 8, 16)
_PARAMETERS: Final[Sequence[dict[str, Any] | None]] = (
    None,
    None,
    {"fullPhysicalCores": True},
    {"strategy": "spread"},
    {"l3": "required"},
    {"numa": "distribute"},
)


def node(cpus: int, group_by: str) -> Inventory:
    """Returns a machine with two sockets, two threads per core, eight cores per L3, and the given number of CPUs in
    total.
    """
    return build_inventory(
        assemble(even_cores(2, 2, cpus // 64, 8, 2)), Config.model_validate({"groupBy": group_by}), builders.NODE
    )


def prepares(inventory: Inventory, pairs: int, seed: int = 1) -> list[float]:
    """Returns the CPU seconds that each of ``pairs`` prepares takes.

    Before each prepare, a random claim is released if the maximum number of claims is already prepared. The maximum is
    48, or one claim for every ten CPUs on a machine with fewer than 480 CPUs.
    """
    choice = random.Random(seed)
    devices = [device.name for device in inventory.pools[0].devices if isinstance(device, CpuDevice)]
    files: dict[ClaimKey, ClaimFile] = {}
    live: list[str] = []
    seconds: list[float] = []
    for number in range(pairs):
        if len(live) >= min(_LIVE_CLAIMS, len(inventory.machine.cpus) // 10):
            files.pop((CPU_DRIVER, live.pop(choice.randrange(len(live)))), None)
        parameters, device, uid = choice.choice(_PARAMETERS), choice.choice(devices), f"claim-{number}"
        asked = builders.cpus(choice.choice(_AMOUNTS), device=device)
        document = builders.claim(uid, asked, config=[] if parameters is None else [builders.opaque(parameters)])
        began = time.thread_time()
        with suppress(RefusedError):
            parsed = parse_driver_claim(parse_claim(document), CPU_DRIVER, inventory, _CONFIG)
            files[CPU_DRIVER, uid] = ClaimFile.of(allocate_claim(parsed, inventory, Ledger(files)))
        seconds.append(time.thread_time() - began)
        live.append(uid)
    return seconds


def samples(pairs: int) -> Iterator[tuple[Quantity, str, list[float]]]:
    """Yields tuples of a quantity, a description of the load, and the samples. The first tuples are for the duration of
    a prepare, one for each way of grouping the CPUs into devices; the others are for how much that duration grows with
    the number of CPUs.
    """
    if pairs == 0:
        return
    for kind in (DeviceKind.NUMA_NODE, DeviceKind.MACHINE):
        seconds = prepares(node(_CPUS, kind), pairs)
        yield quantities.simulated(kind, _CPUS, _P99_BUDGET), _LOAD, [one * 1000 for one in seconds]
    # The growth is measured on a single device that contains all CPUs of the machine.
    sizes = (_SMALLEST, 2 * _SMALLEST, _CPUS)
    some = max(1, pairs // 20)
    medians = [statistics.median(prepares(node(cpus, DeviceKind.MACHINE), some)) for cpus in sizes]
    for cpus, median in zip(sizes[1:], medians[1:], strict=True):
        yield quantities.growth(cpus, _SMALLEST), _LOAD, [median / medians[0]]
