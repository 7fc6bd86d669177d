# SPDX-License-Identifier: Apache-2.0
"""The checks, by subject. Each module has functions from facts to findings and lists its checks in CHECKS. Pure."""
