# SPDX-License-Identifier: Apache-2.0
"""The command ``dra-frontend``: its command line, and the commands that people run beside the service.

Tools may import the pure packages of ``dra_frontend`` and its readers of files and of the API server. The service
imports no tool; ``cli`` imports ``dra_frontend.app`` if the command line has no command.
"""
