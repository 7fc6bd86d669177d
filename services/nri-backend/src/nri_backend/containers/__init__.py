# SPDX-License-Identifier: Apache-2.0
"""The state of containers, the shared pool, and the plans for their cgroups. Pure: no files and no clock."""
