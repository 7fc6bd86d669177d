# SPDX-License-Identifier: Apache-2.0
"""Explains the current state of claims, pods, CPUs and devices of this node, as plain values. Pure.

``commands`` decides which sources are read.
"""
