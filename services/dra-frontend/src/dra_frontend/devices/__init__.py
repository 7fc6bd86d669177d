# SPDX-License-Identifier: Apache-2.0
"""Computes this node's devices from the machine and the configuration.

This package does no I/O and does not depend on allocations.
"""
