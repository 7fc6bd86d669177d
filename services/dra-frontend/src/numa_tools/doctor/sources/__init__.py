# SPDX-License-Identifier: Apache-2.0
"""Fact readers, one module per source. Reads are bounded, change nothing, and return an Unread if they fail."""
