# SPDX-License-Identifier: Apache-2.0
"""Cgroup limits: those that claims need, and those that the runtime sends. Pure, and independent of containers."""
