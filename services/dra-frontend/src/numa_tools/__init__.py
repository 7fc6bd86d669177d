# SPDX-License-Identifier: Apache-2.0
"""The command ``dra-frontend``: its command line, and the commands that people run beside the service.

Tools import the pure packages of ``dra_frontend``, and its access to settings, files of the node and the API server.
The service imports no tool. ``cli`` imports ``dra_frontend.app`` if the command line has no command.
"""
