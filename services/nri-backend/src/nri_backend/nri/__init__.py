# SPDX-License-Identifier: Apache-2.0
"""NRI on one connection, in domain terms. It decides nothing about containers."""
