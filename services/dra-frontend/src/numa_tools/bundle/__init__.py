# SPDX-License-Identifier: Apache-2.0
"""The archive of a bug report: what was read of a node, with names masked on request, and reading it again.

What is put into it is decided in ``commands``.
"""
