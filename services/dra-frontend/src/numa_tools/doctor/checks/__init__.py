# SPDX-License-Identifier: Apache-2.0
"""The checks by subject: functions from facts to findings, and a tuple CHECKS in each module. Pure."""
