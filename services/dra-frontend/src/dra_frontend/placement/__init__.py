# SPDX-License-Identifier: Apache-2.0
"""Chooses CPUs of a topology. Pure; depends on CPUs and parameters, not on claims."""
