# SPDX-License-Identifier: Apache-2.0
"""HTTP: who has what on this node. It shows what others hold and takes the backend's word; it decides nothing."""
