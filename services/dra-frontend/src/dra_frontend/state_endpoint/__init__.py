# SPDX-License-Identifier: Apache-2.0
"""HTTP API: allocations and status of this node, as stored by other packages and reported by the backend."""
