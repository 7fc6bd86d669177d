# SPDX-License-Identifier: Apache-2.0
"""What this process reads, binds and locks on the node. No single claim is known here; the machine's devices are."""
