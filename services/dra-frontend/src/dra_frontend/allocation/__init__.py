# SPDX-License-Identifier: Apache-2.0
"""Computes an allocated claim's allocation record. Pure: no files, no sockets, no clock."""
