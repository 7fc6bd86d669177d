# SPDX-License-Identifier: Apache-2.0
"""Keeps off claimed CPUs what is no container: interrupts, kernel workers, host daemons. Not the cgroups of pods."""
