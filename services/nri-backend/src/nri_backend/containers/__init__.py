# SPDX-License-Identifier: Apache-2.0
"""Containers, the shared pool, and the plans for the containers' cgroups. This package accesses no files and reads no
clock.
"""
