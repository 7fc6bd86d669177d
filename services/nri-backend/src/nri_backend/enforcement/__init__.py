# SPDX-License-Identifier: Apache-2.0
"""The loops: answers hooks, moves others, audits. The only place that waits and writes cgroups."""
