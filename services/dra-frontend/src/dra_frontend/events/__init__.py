# SPDX-License-Identifier: Apache-2.0
"""Kubernetes Events: one object per condition, updated with a count."""
