# SPDX-License-Identifier: Apache-2.0
"""Writes Kubernetes Events: one object per condition, updated with a count."""
