# SPDX-License-Identifier: Apache-2.0
"""Why things are as they are on this node: of claims, pods, CPUs and devices, in values. Pure.

What is read to know it, and where from, is decided in ``commands``.
"""
