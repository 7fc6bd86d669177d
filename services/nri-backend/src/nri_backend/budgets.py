# SPDX-License-Identifier: Apache-2.0
"""Every limit of time of the hooks and of the audit, and how they add up.

A runtime waits for the answer to a hook for its request timeout (``plugin_request_timeout``, 2 s by default). After it
the runtime closes the connection and goes on without the plugin: the container runs with no claim enforced. So every
hook is answered before, with an error if need be, and the kubelet retries the container.

    0 s                                                          1.2 s       1.5 s             2 s
    ├── CLEAR: wait for other containers to leave the CPUs ────────┤           │                 │
    │                                                              ├─ the job ─┤                 │
    ├── DEADLINE: after it the hook is cancelled and answered ─────────────────┤                 │
    │                                                                          ├─ KILL ──┤       │
    └── the runtime's request timeout ───────────────────────────────────────────────────────────┘

* The wait for others ends first, because its rejection names the container that has not left.
* The last 0.3 s before the deadline are for the hook's own job in the cgroup worker. Before it at most one job of the
  audit is at work, which takes JOB_SECONDS, or PASS_BY_SECONDS if it hangs. The job itself takes 1 to 5 ms.
* A hook that is cancelled may leave a container that runs all the same (CRI-O starts it in spite of the error). A
  container with a claim is then killed, within KILL_SECONDS after the deadline.
* The rest, a quarter of a second, is for the way of the answer and for pauses of this process.

The times of the audit say how long a fault may last that no event reports: see "What only polling finds" in DESIGN.md.
"""

from typing import Final

REQUEST_SECONDS: Final = 2.0
"""Request timeout of a runtime that does not state one."""
DEADLINE_SHARE: Final = 0.75
"""Share of the request timeout after which a hook is answered with an error."""
CLEAR_SHARE: Final = 0.6
"""Share of the request timeout during which a hook waits for other containers to leave."""
KILL_SECONDS: Final = 0.25
RETRY_SECONDS: Final = 0.05
"""Time between two requests to move the same containers while a hook waits for them."""
MAX_TRIES: Final = 3
"""Maximum number of jobs of a start that are run because of its plan: the first one, and one more after each change of
the plan during a job. Repetitions for other reasons are not counted."""

JOB_SECONDS: Final = 0.01
"""Time after which a job of the audit leaves the rest of its steps to the next one."""
PASS_BY_SECONDS: Final = 0.1
"""Time after which a job that hangs in the kernel is passed by."""
MAX_STUCK: Final = 4
"""Jobs that may hang at the same time; with more of them nothing new is begun."""
REPORTED_SECONDS: Final = 2.0
"""Time after which a kernel call that hangs is reported as a problem."""

IDLE_SECONDS: Final = 6.0
"""Time between two ticks of the audit, and between two heartbeats, while the node has no claims and its state does not
change. A multiple of a tick (numa_node/ticks.py), and the period of the reports to the frontend, so that the process
wakes up once for both."""
RECORDS_SECONDS: Final = 20.0
"""Time between two comparisons of the content of claim files and of the list of enforcement records."""
ALL_SECONDS: Final = 60.0
"""Time between two audits of everything: of limits, of containers that no claim depends on, and of partitions that the
kernel has refused before. At each tick (2 s) the CPUs are compared, and the mems that are claimed; if a difference is
found, the limits are compared at the next tick."""
READ_SECONDS: Final = 600.0
"""Time between two audits of everything that read and parse all files, not only those that have changed. Nothing but
the sub-cgroup that crun may create in a container's cgroup depends on it."""
OBSERVE_SECONDS: Final = 10.0
"""Time between two passes over all cgroups while ``enforcement`` is ``observe``. A change of the state causes one, too.
"""
KILLS_SECONDS: Final = 6.0
"""Time between two counts of the processes that the kernel has killed in pods with memory claims."""
EVENTS_SECONDS: Final = 1.0
"""Time between two counts of kills that events of the kernel cause."""
REPAIR_SECONDS: Final = 1.0
"""Time between two repairs of partitions, so that a pod which breaks its partition in a loop delays no other one."""
SETTLE_SECONDS: Final = 0.02
"""Time after which a file system's time stamp differs from the present one: the kernel's clock for them moves in steps
of up to 10 ms."""
