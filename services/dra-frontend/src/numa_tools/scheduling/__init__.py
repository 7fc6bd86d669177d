# SPDX-License-Identifier: Apache-2.0
"""Simulation of kube-scheduler on one node: the devices that the claims of a manifest get, or what is missing. Pure.

This package only chooses devices. ``dra_frontend.allocation`` chooses the CPUs of a device that a claim gets.
"""
