# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``dra-frontend`` and ``python -m numa_tools``."""

import gc
import sys


def main() -> int:
    """Runs the command line and returns the exit status."""
    # Imports create 40,000 objects, nearly all of which stay alive. Full collections would visit them over and over and
    # take up a tenth of the start-up time. So only the youngest generation is collected until app.py sets the service's
    # thresholds.
    gc.set_threshold(10_000, 1000, 1000)
    from numa_tools.cli import main as run  # noqa: PLC0415 - see above

    return run()


if __name__ == "__main__":
    sys.exit(main())
