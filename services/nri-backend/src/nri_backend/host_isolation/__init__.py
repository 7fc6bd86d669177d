# SPDX-License-Identifier: Apache-2.0
"""Moves interrupts, kernel workers and host daemons off claimed CPUs. Only ``enforcement`` writes to pods' cgroups."""
