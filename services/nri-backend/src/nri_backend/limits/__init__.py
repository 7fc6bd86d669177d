# SPDX-License-Identifier: Apache-2.0
"""Computes desired values of cgroup files and compares them with observed ones. Pure, and unaware of containers."""
