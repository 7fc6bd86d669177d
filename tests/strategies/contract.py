# SPDX-License-Identifier: Apache-2.0
"""Random but well-formed contract values for property tests."""

from typing import Any

from hypothesis import strategies as st
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER
from numa_contract.records import (
    AllocationRecord,
    AllocationResult,
    ClaimReference,
    CpuAllocation,
    CpuParameters,
    MemoryAllocation,
    MemoryMount,
    MemoryParameters,
    MetadataFile,
    Owner,
    PodReference,
    PoolCpus,
)

uids = st.uuids().map(str)
requests = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
cpu_sets = st.frozensets(st.integers(0, 1023), max_size=20)
page_sizes = st.sampled_from([4096, 16384, 65536, 2 << 20, 32 << 20, 512 << 20, 1 << 30, 16 << 30])
parameters = st.builds(
    CpuParameters,
    cpuset=st.none() | cpu_sets.filter(bool),
    strategy=st.sampled_from(["packed", "spread", "of tomorrow"]),
    full_physical_cores=st.booleans(),
    quota=st.sampled_from(["lift", "keep"]),
    irqs=st.sampled_from(["move", "keep"]),
)
pool_cpus = st.builds(PoolCpus, cpus=cpu_sets, near=cpu_sets)
memory_parameters = st.builds(
    MemoryParameters,
    binding=st.sampled_from(["strict", "preferred", "of tomorrow"]),
    limit=st.sampled_from(["none", "claim"]),
    high=st.none() | st.sampled_from([0.5, 1.0]),
    mount=st.none() | st.builds(MemoryMount, path=st.sampled_from(["/dev/hugepages", "/mnt/ü"])),
)
metadata = st.sampled_from(
    [
        MetadataFile(host_path="/h/metadata.json", mount_path="/m/metadata.json", content=c)
        for c in ("{}", '{"ä": "\\n"}')
    ]
)

# The keywords must be the names in the model's signature, because builds() generates values for required parameters
# that are not passed under these names.
memory_allocations = st.builds(
    MemoryAllocation,
    request=st.just("r"),
    device=st.just("memory-numa000"),
    numaNode=st.integers(0, 15),
    size=st.integers(1, 1 << 40),
    pageBytes=page_sizes,
    hugepages=st.booleans(),
)


@st.composite
def records(draw: st.DrawFn) -> AllocationRecord:
    """Draws a record of either driver with one to three requests."""
    names = draw(st.lists(requests, min_size=1, max_size=3, unique=True))
    driver = draw(st.sampled_from([CPU_DRIVER, MEMORY_DRIVER]))
    given: dict[str, Any] = {}
    if driver == CPU_DRIVER:
        given["cpus"] = tuple(CpuAllocation(request=n, device="cpudevnuma000", cpus=draw(cpu_sets)) for n in names)
        given["parameters"] = draw(st.dictionaries(st.sampled_from(names), parameters))
        given["pool_cpus"] = draw(st.dictionaries(st.sampled_from(names), pool_cpus))
    else:
        given["memory"] = tuple(draw(memory_allocations).model_copy(update={"request": n}) for n in names)
        given["memory_parameters"] = draw(st.dictionaries(st.sampled_from(names), memory_parameters))
    return AllocationRecord(
        driver=driver,
        claim=ClaimReference(uid=draw(uids), namespace="default", name="claim"),
        reserved_for=tuple(PodReference(uid=uid, name="pod") for uid in draw(st.lists(uids, max_size=3))),
        results=tuple(AllocationResult(request=n, pool="node", device="d", consumed={"size": "1Gi"}) for n in names),
        **given,
        metadata=draw(st.dictionaries(st.sampled_from(names), metadata)),
        sharing=draw(st.sampled_from(["container", "pod"])),
        owner=draw(st.none() | st.builds(Owner, podUid=uids, container=requests)),
    )
