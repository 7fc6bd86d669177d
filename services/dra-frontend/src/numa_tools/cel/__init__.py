# SPDX-License-Identifier: Apache-2.0
"""Evaluation of device selectors: the supported part of the CEL dialect of Kubernetes (ADR 28). Pure."""
