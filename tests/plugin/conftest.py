# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the kubectl plugin's tests."""

from tests.plugin.rig import plugin

__all__ = ["plugin"]
