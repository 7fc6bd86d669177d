# SPDX-License-Identifier: Apache-2.0
"""``kubectl numa``: CPUs, memory and hugepages of a whole cluster, from what the API server has of slices and claims.

It runs on an operator's machine, as one file, with the standard library alone; ``kubectl`` is its way to the cluster.
Nothing of the services may be imported here, and nothing but :mod:`kubectl_numa.kubectl` talks.
"""

__version__ = "0.2.0"
