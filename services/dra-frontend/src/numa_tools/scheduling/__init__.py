# SPDX-License-Identifier: Apache-2.0
"""What kube-scheduler makes of manifests on this one node: which devices a claim gets, or what is missing. Pure.

Which CPUs of a device a claim gets is not decided here, but in ``allocation``.
"""
