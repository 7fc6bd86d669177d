# SPDX-License-Identifier: Apache-2.0
"""The program."""

import os
import sys

from kubectl_numa.cli import run
from kubectl_numa.kubectl import ENVIRONMENT


def main() -> None:
    """Runs the command line and ends the process."""
    try:
        code = run(sys.argv[1:], os.environ.get(ENVIRONMENT, "kubectl"))
        sys.stdout.flush()
    except BrokenPipeError:  # "| head" has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
