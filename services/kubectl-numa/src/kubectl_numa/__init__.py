# SPDX-License-Identifier: Apache-2.0
"""``kubectl numa``: shows a whole cluster's CPUs, memory and hugepages, as read from ResourceSlices and ResourceClaims.

The plugin is a single file that an operator can run with nothing but Python's standard library, so it imports nothing
from the services. All access to the cluster goes through ``kubectl``, which only :mod:`kubectl_numa.kubectl` runs.
"""

__version__ = "0.2.0"
