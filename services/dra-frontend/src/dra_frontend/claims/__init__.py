# SPDX-License-Identifier: Apache-2.0
"""Stores this node's claims durably and keeps their records up to date. ``allocation`` decides which CPUs a claim
gets.
"""
