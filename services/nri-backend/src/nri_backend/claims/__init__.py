# SPDX-License-Identifier: Apache-2.0
"""Determines, from the claim records, which claims a container holds. Pure: nothing here reads from the kernel."""
