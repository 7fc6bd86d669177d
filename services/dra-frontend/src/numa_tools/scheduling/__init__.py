# SPDX-License-Identifier: Apache-2.0
"""Simulation of kube-scheduler on one node: the devices that a manifest's claims get, or what is missing. Pure.

This package chooses only devices. ``dra_frontend.allocation`` chooses a device's CPUs for a claim.
"""
