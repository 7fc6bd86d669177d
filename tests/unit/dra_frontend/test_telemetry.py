# SPDX-License-Identifier: Apache-2.0
"""What a scrape of the frontend tells."""

import time

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.node.machine_watch import HostTrees, MachineWatch
from dra_frontend.telemetry import Telemetry
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config

from tests.fakes.trees import MemoryTree, captured


def test_damaged_claim_files_are_counted_and_keep_their_cpus() -> None:
    """Somebody must look at a file without a record; nobody gets its CPUs meanwhile."""
    ledger = Ledger({("dra.cpu", "u"): ClaimFile("dra.cpu", "u", None, frozenset({2, 3}), "damaged")})
    trees = HostTrees(captured("32intel64-2p8co2t+8ve"), MemoryTree({}))
    watch = MachineWatch(trees, Config(), "node", lambda: ledger)
    lines = Telemetry(lambda: ledger, watch, BackendView(time.monotonic)).render().decode().splitlines()
    assert "dra_numa_records_unreadable 1.0" in lines
    assert "dra_cpu_allocated_cpus 2.0" in lines
