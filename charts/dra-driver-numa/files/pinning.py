# SPDX-License-Identifier: Apache-2.0
"""Succeeds if this process may run on exactly the CPUs that are allocated to its claim."""

import os
import sys
from pathlib import Path

given = {key: value for key, value in os.environ.items() if key.startswith("DRA_CPUSET_")}
status = Path("/proc/self/status").read_text()
allowed = next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:"))
print(f"the claim allocates {given}, the kernel allows {allowed}")
sys.exit(0 if list(given.values()) == [allowed] else 1)
