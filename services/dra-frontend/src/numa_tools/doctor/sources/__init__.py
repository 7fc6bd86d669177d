# SPDX-License-Identifier: Apache-2.0
"""Readers of facts, one module per place. Reads are bounded, change nothing, and return an Unread if they fail."""
