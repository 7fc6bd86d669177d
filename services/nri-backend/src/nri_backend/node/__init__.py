# SPDX-License-Identifier: Apache-2.0
"""Access to the kernel and the disk: cgroups, online CPUs, the active lock. Other packages decide what is written."""
