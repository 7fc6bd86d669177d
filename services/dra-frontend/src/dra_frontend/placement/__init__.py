# SPDX-License-Identifier: Apache-2.0
"""Chooses CPUs from a topology. The package is pure: it depends on CPUs and parameters, not on claims."""
