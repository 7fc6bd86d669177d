# SPDX-License-Identifier: Apache-2.0
"""Manages the files, sockets and locks of this process on the node. No module here depends on claims."""
