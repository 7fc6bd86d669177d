# SPDX-License-Identifier: Apache-2.0
"""Determines, from the claim records, which claims a container holds. This package reads nothing from the kernel."""
