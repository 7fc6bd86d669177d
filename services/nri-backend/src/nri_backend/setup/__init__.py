# SPDX-License-Identifier: Apache-2.0
"""Checks what a container runtime's configuration lacks; edits no file. A command: the service does not import it."""
