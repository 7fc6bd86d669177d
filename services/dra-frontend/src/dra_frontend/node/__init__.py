# SPDX-License-Identifier: Apache-2.0
"""What this process reads, binds and locks on the node. No claim and no device is known here."""
