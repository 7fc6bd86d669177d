# SPDX-License-Identifier: Apache-2.0
"""Diagnoses this node and suggests remedies. It only reads, and it works while the service is down.

``sources`` reads the node and the cluster. Each of its modules reads one source, within limits, and returns an
``Unread`` if that fails. ``facts`` defines the values that the sources return. ``checks`` derives findings from facts
and is pure: a check never guesses facts that could not be read. ``table`` lists all checks. Nothing in this package
starts, repairs or writes anything.
"""
