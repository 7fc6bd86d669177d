# SPDX-License-Identifier: Apache-2.0
"""Cgroup limits: those that claims require, and those that the runtime sends. Pure. Independent of ``containers``."""
