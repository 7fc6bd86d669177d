# SPDX-License-Identifier: Apache-2.0
"""The commands. None of them starts the service or keeps state, and only ``provision`` changes the node."""
