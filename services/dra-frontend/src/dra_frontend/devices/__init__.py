# SPDX-License-Identifier: Apache-2.0
"""Computes this node's devices from the machine and the configuration. Pure; does not depend on allocations."""
