# SPDX-License-Identifier: Apache-2.0
"""Explains the current state of this node's claims, pods, CPUs and devices.

The functions are pure and return plain values. ``commands`` decides which sources are read.
"""
