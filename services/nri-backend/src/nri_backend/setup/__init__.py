# SPDX-License-Identifier: Apache-2.0
"""Checks what a container runtime's configuration lacks. A command: the service does not import it.

``containerd`` and ``drop_in`` are pure; only ``command`` reads, runs and writes. Nothing here edits an existing file.
"""
