# SPDX-License-Identifier: Apache-2.0
"""Enforces claims in hooks and audits. The only package that waits for containers and writes their cgroups."""
