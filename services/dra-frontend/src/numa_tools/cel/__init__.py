# SPDX-License-Identifier: Apache-2.0
"""Evaluation of device selectors: the supported part of Kubernetes' CEL dialect (ADR 28). Pure."""
