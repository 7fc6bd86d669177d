# SPDX-License-Identifier: Apache-2.0
"""Runs inside a container with shared CPUs in addition to exclusive ones: pins a thread to each CPU set in its
variables.

The first thread is the data plane, the second one the control thread.
"""

import os
import signal
import threading


def pin(prefix: str) -> None:
    """Pins the calling thread to the CPUs in the environment variable whose name has this prefix."""
    (text,) = (value for name, value in os.environ.items() if name.startswith(prefix))
    ends = [part.partition("-") for part in text.split(",")]
    os.sched_setaffinity(0, {cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)})


def control() -> None:
    """Runs the control thread, which pins itself to the shared CPUs and then sleeps."""
    pin("DRA_SHARED_CPUSET_")
    print("split", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    pin("DRA_CPUSET_")
    threading.Thread(target=control, daemon=True).start()
    signal.pause()
