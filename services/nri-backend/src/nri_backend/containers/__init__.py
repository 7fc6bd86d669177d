# SPDX-License-Identifier: Apache-2.0
"""Containers, the shared pool, and the plans for the containers' cgroups. The code in this package neither accesses
files nor reads the clock.
"""
