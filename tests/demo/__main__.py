# SPDX-License-Identifier: Apache-2.0
"""``make demo``: runs both services with this machine's topology and shows what they do for a claim.

The other components are fakes, so the demo requires neither root nor a cluster.

The demo checks everything that it shows: if anything is not as expected, the exit status is not 0 and a message gives
the reason.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.demo.play import UnexpectedStateError, play
from tests.demo.tables import say
from tests.stage.process import StageError, end_by_interrupt
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError


def main() -> int:
    """Runs the demo and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument("--host-root", type=Path, default=Path("/"), help="show another machine's files (default /)")
    settings = StageSettings(host_root=parser.parse_args().host_root)
    online = settings.host_root / "sys/devices/system/cpu/online"
    if not online.exists():
        text = "every supported kernel has this file, so nri-backend requires it; dra-frontend inspect does not"
        print(f"demo: failed: {online} is missing: {text}", file=sys.stderr)
        return 1
    end_by_interrupt()
    began = time.monotonic()
    try:
        with Stage(settings) as stage:
            shown = play(stage)
            statuses = [process.stop() for process in stage.processes]
        if any(statuses) or stage.paths.base.exists():
            raise UnexpectedStateError(
                f"both services should end with status 0 and leave no file: the statuses are {statuses}"
            )
    except KeyboardInterrupt:
        print("demo: interrupted; all processes that it had started have ended", file=sys.stderr)
        return 130
    except (UnexpectedStateError, StageError, AnsweredError, OSError) as error:
        sys.stdout.flush()
        print(f"\ndemo: failed: {error}", file=sys.stderr)
        return 1
    say(f"\nShown in {time.monotonic() - began:.0f} s: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
