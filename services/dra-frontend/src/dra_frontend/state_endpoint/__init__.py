# SPDX-License-Identifier: Apache-2.0
"""HTTP API for this node's allocations and status, as stored by other packages and reported by the backend."""
