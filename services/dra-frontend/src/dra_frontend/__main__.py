# SPDX-License-Identifier: Apache-2.0
"""Starts the command; ``python -m dra_frontend`` is the same."""

import sys

from dra_frontend.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
