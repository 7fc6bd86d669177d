# SPDX-License-Identifier: Apache-2.0
"""Discovers the machine's hardware by reading a file tree. The results are immutable. The package never writes to the
tree and keeps no state; ``devices`` decides which resources are offered.
"""
