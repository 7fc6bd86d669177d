# SPDX-License-Identifier: Apache-2.0
"""Evaluates device selectors, which are written in Kubernetes' CEL dialect. A subset of it is supported (ADR 28). This
package does no I/O.
"""
