# SPDX-License-Identifier: Apache-2.0
"""The archive for a bug report: recording the files read from a node, masking names, and unpacking the archive.

``commands`` decides which files the archive contains.
"""
