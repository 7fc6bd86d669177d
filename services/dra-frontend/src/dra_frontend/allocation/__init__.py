# SPDX-License-Identifier: Apache-2.0
"""Computes the allocation record of a claim that the scheduler has allocated.

This package does no I/O and does not read the clock.
"""
