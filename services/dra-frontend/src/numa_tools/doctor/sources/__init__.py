# SPDX-License-Identifier: Apache-2.0
"""Readers of facts, one module per place. Each read is bounded, changes nothing, and returns an Unread if it fails."""
