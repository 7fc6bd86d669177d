# SPDX-License-Identifier: Apache-2.0
"""Computes the allocation record of a claim that the scheduler has allocated. Pure: no files, no sockets, no clock."""
