# SPDX-License-Identifier: Apache-2.0
"""Display texts for values in the documents.

The commands import this module. The web page and ``kubectl numa`` do not import it and contain copies of the texts;
tests compare these with the originals.
"""

from typing import Final

USES: Final = {
    "exclusive": "allocated to a claim that only one container uses",
    "isolated": "like exclusive, but without the kernel's load balancing",
    "pod-shared": "shared by the containers of one pod",
    "held": "kept for a claim that is being released or whose record is lost",
    "pool": "free to claim; all containers without a claim run here",
    "withheld": "always in the pool; never allocated to a claim",
    "reserved": "kept for the system",
    "offline": "switched off in the kernel",
}
"""Display text for each use of a CPU in ``/v1/node``."""
KEPT_BY: Final = {
    "partition": "the kernel (cpuset partition)",
    "isolated": "the kernel (isolated cpuset partition)",
    "pool": "the shared pool",
}
"""Names of the mechanisms that keep other processes off a claim's CPUs, by ``exclusivity``."""
ENFORCED: Final = {"True": "yes", "False": "no", "Unknown": "not known"}
"""Display text for each status of a claim's ``Enforced`` condition."""
LEVELS: Final = {"fault": "Problem", "warning": "Warning"}
"""Names of the problem levels in ``/v1/node``."""
UNITS: Final = ("Ki", "Mi", "Gi", "Ti", "Pi")
"""Units for amounts of memory, as in Kubernetes quantities."""
