# SPDX-License-Identifier: Apache-2.0
"""Enforces claims in hooks and audits. Only this package waits for containers and writes to their cgroups."""
