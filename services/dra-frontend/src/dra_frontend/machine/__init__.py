# SPDX-License-Identifier: Apache-2.0
"""Discovers the machine through a file tree, as immutable values. Pure; ``devices`` decides what is offered of it."""
