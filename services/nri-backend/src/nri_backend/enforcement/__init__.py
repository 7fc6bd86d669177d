# SPDX-License-Identifier: Apache-2.0
"""Enforces claims in the hooks and in the audit. The only package that waits for containers and writes cgroups."""
