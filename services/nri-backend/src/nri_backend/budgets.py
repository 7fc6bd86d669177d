# SPDX-License-Identifier: Apache-2.0
"""All time limits for the hooks and the audit, and how they add up.

A runtime waits for the answer to a hook for at most its request timeout (``plugin_request_timeout``, 2 s by default).
After that, it closes the connection and continues without the plugin, so the container would run without enforcement.
Therefore every hook is answered in time, with an error if necessary, and the kubelet retries the container.

  0 s                                                          1.2 s       1.5 s             2 s
  ├── CLEAR: wait for other containers to leave the CPUs ────────┤           │                 │
  │                                                              ├─ the job ─┤                 │
  ├── DEADLINE: then the hook is cancelled ──────────────────────────────────┤                 │
  │                                                                          ├─ KILL ──┤       │
  └── the runtime's request timeout ───────────────────────────────────────────────────────────┘

* The wait for other containers ends before the deadline, so that the hook can still answer with a rejection that names
  the container that has not left.
* The last 0.3 s before the deadline are reserved for the hook's own job in the cgroup worker. The hook's job may have
  to wait for one audit job, which takes JOB_SECONDS, or ABANDON_SECONDS if it hangs. The hook's own job takes
  1 to 5 ms.
* A container may run even though its start was cancelled (CRI-O starts it despite the error). If the container's
  environment names a claim, the cancelled hook kills it, and waits for the kill for at most KILL_SECONDS before it is
  answered. Any other cancelled hook is answered at the deadline.
* The remaining quarter of a second allows for sending the answer and for stalls in this process.

The audit's intervals determine how long a fault that no event reports can last: see "What only polling finds" in
DESIGN.md.
"""

from typing import Final

REQUEST_SECONDS: Final = 2.0
"""Request timeout assumed for a runtime that does not report one."""
DEADLINE_SHARE: Final = 0.75
"""Fraction of the request timeout after which a hook is cancelled, so that it is answered with an error."""
CLEAR_SHARE: Final = 0.6
"""Fraction of the request timeout for which a hook waits for other containers to leave the CPUs."""
KILL_SECONDS: Final = 0.25
RETRY_SECONDS: Final = 0.05
"""Interval between repeated requests to move the same containers while a hook waits for them to leave, and between two
jobs of a start if the first one finds other containers on the CPUs.
"""
MAX_TRIES: Final = 3
"""Maximum number of jobs that are run for one container start if the container's plan keeps changing: the first job,
plus one for each time that the plan changes during a job. Retries for other reasons are not counted.
"""

JOB_SECONDS: Final = 0.01
"""Time after which an audit job leaves its remaining steps to the next job."""
LOOP_BLOCK_SECONDS: Final = 0.002
"""Maximum time for which the event loop blocks on a hook's job. The job for a container start takes about half of this
time.
"""
ABANDON_SECONDS: Final = 0.1
"""Time after which the worker continues without a job that is hung in the kernel."""
MAX_HUNG: Final = 4
"""Maximum number of jobs that may hang at the same time. While this many jobs are hung, no new job begins."""
FINISH_SECONDS: Final = 1.0
"""Maximum time for which an instance that is shutting down waits for its threads before it releases the active lock. No
instance enforces claims in the meantime.
"""
HANG_REPORT_SECONDS: Final = 2.0
"""Time after which a hung kernel call is reported as a problem."""

IDLE_SECONDS: Final = 6.0
"""Interval between audit ticks, and between heartbeats, while the node has no claims and its state does not change. It
is a multiple of the tick interval (numa_node/ticks.py) and equal to the interval between reports to the frontend, so a
single wake-up of the process serves all three.
"""
RECORDS_SECONDS: Final = 20.0
"""Interval at which claim files and the list of enforcement records are compared with the backend's in-memory
copies.
"""
ALL_CONTAINERS_SECONDS: Final = 60.0
"""Interval between full audits of all containers. Such an audit includes limits, containers that no claim depends on,
and partitions that the kernel has refused. The audit at each tick (2 s) compares only the CPUs, and the NUMA nodes if
they are claimed; if it finds a difference, the next tick compares the limits as well.
"""
REREAD_SECONDS: Final = 600.0
"""Interval between full audits that read and parse all files, even unchanged ones. They are needed only to notice a
sub-cgroup that crun has created in a container's cgroup.
"""
OBSERVE_SECONDS: Final = 10.0
"""Interval between passes over all cgroups while ``enforcement`` is ``observe``. A state change also starts a pass."""
KILL_COUNT_SECONDS: Final = 6.0
"""Interval between counts of the processes that the kernel has killed in pods with memory claims."""
EVENTS_SECONDS: Final = 1.0
"""Minimum interval between counts of killed processes that are triggered by kernel events. Also the minimum interval
between two wake-ups of the audit that are caused by events in the same exited container's cgroup: an event that occurs
earlier wakes the audit only after this interval.
"""
REPAIR_SECONDS: Final = 1.0
"""Minimum interval between partition repairs, so that a pod that keeps breaking its partition does not delay other
pods.
"""
TIMESTAMP_STEP_SECONDS: Final = 0.02
"""Time after which another change to a file is certain to get a later timestamp, since the clock from which the kernel
takes timestamps advances in steps of up to 10 ms.
"""
