# SPDX-License-Identifier: Apache-2.0
"""Whom the kernel killed for want of memory, told apart by container. Core: counts in, differences out.

A cgroup's ``memory.events`` counts for everything below it, too (cgroup-v2.rst). A container's cgroup is removed with
its last process; what it does not tell any more is in the count of its pod.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

EVENTS: Final = "memory.events"


def kill_count(text: str) -> int:
    """Returns how many processes were killed, from the text of ``memory.events``; 0 where it does not say."""
    fields = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    count = fields.get("oom_kill", "0")
    return int(count) if count.isdecimal() else 0


@dataclass(slots=True)
class PodKills:
    """The counts of one pod, as far as they are accounted for."""

    total: int
    """Of the pod's count, what was there before or has been told of a container."""
    own: dict[str, int] = field(default_factory=dict)
    """By container, what its own cgroup said last."""

    def take(self, total: int, own: Mapping[str, int | None], ended: str = "") -> dict[str, int]:
        """Takes new counts of the pod and of its containers, None where there is no cgroup; returns the new kills.

        What no container's own count has falls to ``ended``, of which the runtime has just told the end, else to the
        only one whose cgroup is gone since the last look: the kernel is often faster than the runtime.
        """
        counts = {name: count for name, count in own.items() if count is not None}
        new = {name: count - self.own.get(name, 0) for name, count in counts.items() if count > self.own.get(name, 0)}
        gone = [name for name in self.own if name in own and name not in counts]
        if not ended and len(gone) == 1:
            ended = gone[0]
        rest = total - self.total - sum(new.values())
        if ended and rest > 0:
            new[ended] = new.get(ended, 0) + rest
        self.total += sum(new.values())
        # Of a cgroup that outlives its container for a while the count goes on.
        self.own = counts | {name: self.own[name] for name in gone if name != ended}
        return new
