# SPDX-License-Identifier: Apache-2.0
"""Computes the devices of this node from the machine and the configuration. Pure; does not depend on allocations."""
