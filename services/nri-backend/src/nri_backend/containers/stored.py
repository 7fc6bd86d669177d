# SPDX-License-Identifier: Apache-2.0
"""What a runtime has stored of containers that exist, compared with what it should have stored."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from numa_contract.cpuset import format_cpu_list, parse_cpu_list, parse_or_none

from nri_backend.containers.container import Tracked
from nri_backend.nri.model import Container, Resources, Update

# containerd applies these one by one under its node-wide lock, some 30 ms each, and CRI-O fails the synchronisation
# when one fails. Only the runtime's memory is at stake: the kernel's files are written by us.
MAX_SYNC_UPDATES: Final = 32
_log = logging.getLogger(__name__)


def stored_updates(containers: Iterable[tuple[Container, Tracked, Resources]], *, lazy: bool = False) -> list[Update]:
    """Returns the updates that are most worth while, those of containers with CPUs of their own first.

    ``containers``: as the runtime shows them, as they are known, and what they should have. The runtime writes what it
    stores, too; so with ``lazy`` a member of the pool keeps what is stored, as far as that is in the pool.
    """
    updates = []
    for container, tracked, full in containers:
        stored = container.resources
        wanted = replace(full, cpus=_kept(stored.cpus, full.cpus)) if lazy and not tracked.own_cpus else full
        if wanted.cpus and not (
            _same_set(wanted.cpus, stored.cpus) and (not wanted.mems or _same_set(wanted.mems, stored.mems))
        ):
            updates.append((not tracked.own_cpus, Update(container.id, wanted)))
    updates.sort(key=lambda pair: pair[0])
    if len(updates) > MAX_SYNC_UPDATES:
        text = "stored values stay as they are in the runtime; the audit holds the kernel's files true"
        _log.info(text, extra={"left": len(updates) - MAX_SYNC_UPDATES})
    return [update for _, update in updates[:MAX_SYNC_UPDATES]]


def _kept(stored: str, pool: str) -> str:
    return format_cpu_list((parse_or_none(stored) or frozenset()) & parse_cpu_list(pool)) or pool


def _same_set(wanted: str, stored: str) -> bool:
    return parse_cpu_list(wanted) == parse_or_none(stored)
