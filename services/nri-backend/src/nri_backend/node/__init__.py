# SPDX-License-Identifier: Apache-2.0
"""Kernel and disk: cgroups, CPUs online, the lock. What files should say is decided elsewhere."""
