# SPDX-License-Identifier: Apache-2.0
"""The commands. None of them starts the service or stores anything, and only ``provision`` changes the node."""
