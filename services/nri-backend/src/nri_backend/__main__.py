# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``nri-backend``: runs the service, or the command that sets up a container runtime."""

import gc
import sys
from collections.abc import Sequence

from numa_node.lazy_modules import add_lazy_modules


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Imported here, so that each command loads only the modules that it uses.
    if arguments[:1] == ["setup-runtime"]:
        from nri_backend.setup.command import main as set_up  # noqa: PLC0415

        return set_up(arguments[1:])
    # Imports create 40,000 objects, nearly all of which stay alive. A full collection would visit all of them each
    # time. Therefore, only the youngest generation is collected until app.py sets the service's thresholds.
    gc.set_threshold(10_000, 1000, 1000)
    add_lazy_modules("google.protobuf.internal.python_message")  # not needed by protobuf's C implementation
    from nri_backend.app import main as run  # noqa: PLC0415

    return run(["--version"] if arguments == ["version"] else arguments)


if __name__ == "__main__":
    sys.exit(main())
