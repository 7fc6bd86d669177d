# SPDX-License-Identifier: Apache-2.0
"""Simulates kube-scheduler on one node: determines which devices the claims in a manifest get, or what is missing.

This package does no I/O. It chooses only devices; ``dra_frontend.allocation`` chooses a device's CPUs for a claim.
"""
