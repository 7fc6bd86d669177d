# SPDX-License-Identifier: Apache-2.0
"""The claims of this node, durable and kept true. Which CPUs a claim gets is decided in ``allocation``, not here."""
