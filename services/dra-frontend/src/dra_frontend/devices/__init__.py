# SPDX-License-Identifier: Apache-2.0
"""What the node offers, from the machine and the configuration. Pure; who holds it is not known here."""
