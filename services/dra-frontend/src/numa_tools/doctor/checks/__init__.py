# SPDX-License-Identifier: Apache-2.0
"""The checks, by subject. A module's functions derive findings from facts, and its ``CHECKS`` lists the module's
checks. This package does no I/O.
"""
