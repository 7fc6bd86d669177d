# SPDX-License-Identifier: Apache-2.0
"""The command ``nri-backend``: runs the service, or sets up a container runtime for it."""

import gc
import sys
from collections.abc import Sequence

from numa_node.lazy_modules import add_lazy_modules


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Neither pays for the modules of the other.
    if arguments[:1] == ["setup-runtime"]:
        from nri_backend.setup.command import main as set_up  # noqa: PLC0415

        return set_up(arguments[1:])
    # Imports create 40,000 objects, and nearly all of them stay in use. Full collections would visit all of them many
    # times. So only the youngest objects are collected until app.py sets the thresholds of the service.
    gc.set_threshold(10_000, 1000, 1000)
    add_lazy_modules("google.protobuf.internal.python_message")  # replaced by C code
    from nri_backend.app import main as run  # noqa: PLC0415

    return run(["--version"] if arguments == ["version"] else arguments)


if __name__ == "__main__":
    sys.exit(main())
