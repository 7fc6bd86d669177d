# SPDX-License-Identifier: Apache-2.0
"""Starts the command; ``python -m numa_tools`` is the same."""

import gc
import sys


def main() -> int:
    """Runs the command line; returns the exit status."""
    # Imports create 40,000 objects that all stay. Collections would visit them many times, which takes a sixth of the
    # time of a start. cli.py and app.py switch the collector on again.
    gc.disable()
    from numa_tools.cli import main as run  # noqa: PLC0415 - see above

    return run()


if __name__ == "__main__":
    sys.exit(main())
