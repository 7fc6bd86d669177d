# SPDX-License-Identifier: Apache-2.0
"""Selectors of devices: the part of CEL that Kubernetes accepts and that is evaluated here (ADR 28). Pure."""
