# SPDX-License-Identifier: Apache-2.0
"""The archive for a bug report: recording what was read from a node, masking names, and reading the archive again.

``commands`` decides which files it contains.
"""
