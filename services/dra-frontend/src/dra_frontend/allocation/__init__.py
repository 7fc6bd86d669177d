# SPDX-License-Identifier: Apache-2.0
"""Computes the allocation record of an allocated claim. Pure: no files, no sockets, no clock."""
