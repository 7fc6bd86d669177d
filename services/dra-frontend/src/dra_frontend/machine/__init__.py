# SPDX-License-Identifier: Apache-2.0
"""Discovers the machine from a file tree and returns immutable values. The package only reads the tree and keeps no
state; ``devices`` decides which resources are offered.
"""
