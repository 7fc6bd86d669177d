# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine that runs the benchmark."""

import os
import platform
from pathlib import Path


def facts() -> dict[str, str]:
    """Returns the facts that determine whether the figures in two reports can be compared."""
    return {
        "Processor": _processor(),
        "CPUs for this run": str(len(os.sched_getaffinity(0))),
        "Memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "Kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "Load average at the beginning": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    """Returns the processor's name, or only the architecture on Arm, where the kernel does not report the name."""
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()
