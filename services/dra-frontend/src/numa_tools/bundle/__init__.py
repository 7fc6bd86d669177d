# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the archive for a bug report: records the files read from a node, masks names, and unpacks the
archive.

``commands`` decides which files the archive contains.
"""
