# SPDX-License-Identifier: Apache-2.0
"""Cgroup limits: those that claims require, and those that the runtime sends. This package does no I/O and does
not depend on ``containers``.
"""
