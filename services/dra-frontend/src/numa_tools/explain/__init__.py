# SPDX-License-Identifier: Apache-2.0
"""Explains the present state of claims, pods, CPUs and devices of this node, as values. Pure.

What is read to know it, and where from, is decided in ``commands``.
"""
