# SPDX-License-Identifier: Apache-2.0
"""The rig of every test of the plugin."""

from tests.plugin.rig import plugin

__all__ = ["plugin"]
