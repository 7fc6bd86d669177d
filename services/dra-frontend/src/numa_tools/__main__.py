# SPDX-License-Identifier: Apache-2.0
"""Starts the command; ``python -m numa_tools`` is the same."""

import sys

from numa_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
