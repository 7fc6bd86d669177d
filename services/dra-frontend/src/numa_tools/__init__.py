# SPDX-License-Identifier: Apache-2.0
"""The ``dra-frontend`` program: its command-line interface and the commands for administrators.

The commands import the pure packages of ``dra_frontend`` and its adapters for settings, node files and the API server.
The service never imports a command. If the command line names no command, ``cli`` starts the service
(``dra_frontend.app``).
"""
