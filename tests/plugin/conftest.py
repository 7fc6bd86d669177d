# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests of the kubectl plugin."""

from tests.plugin.rig import plugin

__all__ = ["plugin"]
