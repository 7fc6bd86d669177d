# SPDX-License-Identifier: Apache-2.0
"""Explains the current state of this node's claims, pods, CPUs and devices, as plain values. Pure.

``commands`` decides which sources are read.
"""
