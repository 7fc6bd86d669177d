# SPDX-License-Identifier: Apache-2.0
"""Manages this process's files, sockets and locks on the node. No module here depends on claims."""
