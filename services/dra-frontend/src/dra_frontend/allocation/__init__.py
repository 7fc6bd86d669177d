# SPDX-License-Identifier: Apache-2.0
"""From an allocated claim to its record. Pure: no files, no sockets, no clock."""
