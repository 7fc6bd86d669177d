# SPDX-License-Identifier: Apache-2.0
"""Finds settings missing from a container runtime's configuration. The service does not import this package."""
