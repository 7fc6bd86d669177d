# SPDX-License-Identifier: Apache-2.0
"""Computes the claims that a container holds from the claim records. Pure: nothing here reads the kernel."""
