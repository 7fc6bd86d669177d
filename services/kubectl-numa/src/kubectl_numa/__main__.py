# SPDX-License-Identifier: Apache-2.0
"""Entry point of the plugin."""

import os
import sys

from kubectl_numa.cli import run
from kubectl_numa.kubectl import ENVIRONMENT


def main() -> None:
    """Runs the command given on the command line and exits with its status."""
    try:
        code = run(sys.argv[1:], os.environ.get(ENVIRONMENT, "kubectl"))
        sys.stdout.flush()
    except BrokenPipeError:  # the process that reads the output, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
