# SPDX-License-Identifier: Apache-2.0
"""What is wrong with this node, and what to do about it. Reads only, and works while the service is down.

``sources`` has the edges: each reads one thing, within bounds, and gives an ``Unread`` where it cannot. ``facts`` says
what they give. ``checks`` judge facts, and are pure: a check never guesses what its source could not read. ``table``
lists all checks. Nothing here starts, repairs or writes anything.
"""
