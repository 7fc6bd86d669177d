# SPDX-License-Identifier: Apache-2.0
"""Stores the claims of this node durably and keeps their records up to date. ``allocation`` decides which CPUs a claim
gets.
"""
