# SPDX-License-Identifier: Apache-2.0
"""Diagnoses this node and suggests remedies. Only reads, and works while the service is down.

``sources`` reads the node and the cluster. Each module reads one place, within limits, and returns an ``Unread`` if
that fails. ``facts`` defines the values that they return. ``checks`` derive findings from facts and are pure: a check
never guesses what its source could not read. ``table`` lists all checks. Nothing in this package starts, repairs or
writes anything.
"""
