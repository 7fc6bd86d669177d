# SPDX-License-Identifier: Apache-2.0
"""Files, sockets and locks of this process on the node. No module here depends on claims."""
