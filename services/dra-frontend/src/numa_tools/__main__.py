# SPDX-License-Identifier: Apache-2.0
"""Starts the command; ``python -m numa_tools`` is the same."""

import gc
import sys


def main() -> int:
    """Runs the command line; returns the exit status."""
    # Imports create 40,000 objects, and nearly all of them stay in use. Full collections would visit all of them many
    # times, which takes a tenth of the time of a start. So only the youngest objects are collected until app.py sets
    # the thresholds of the service.
    gc.set_threshold(10_000, 1000, 1000)
    from numa_tools.cli import main as run  # noqa: PLC0415 - see above

    return run()


if __name__ == "__main__":
    sys.exit(main())
