# SPDX-License-Identifier: Apache-2.0
"""Keeps off claimed CPUs what is no container: interrupts, unbound workqueues. Not the cgroups of pods."""
