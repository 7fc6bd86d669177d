# SPDX-License-Identifier: Apache-2.0
"""The third service of docker-compose.yaml: runs fakes of the API server, the kubelet and the runtime, and repeats the
demo.

The other two services are the frontend and the backend, which share directories with this service. The demo checks
everything that it shows.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.demo.play import UnexpectedStateError, play
from tests.demo.tables import say
from tests.stage.process import StageError, end_by_interrupt, wait_for
from tests.stage.settings import Paths, StageSettings
from tests.stage.stage import Instance, Stage
from tests.stage.wires import AnsweredError

_STARTING = 120.0  # seconds; images may have to be pulled
_PAUSE = 5.0


_SHARED = ("cdi_dir", "run_dir", "kubelet_root", "cgroup_root", "nri_socket", "kubeconfig")
"""Paths shared with other containers; everything else is under the base directory."""


class SharedStage(Stage):
    """A stage that starts only the fakes as processes."""

    def __init__(self, paths: Paths, pod_uid: str, node: str) -> None:
        super().__init__(StageSettings(frontend="", backend="", node=node))
        self._shared = paths
        self._pod_uid = pod_uid

    def _make_paths(self) -> Paths:
        return self._shared

    def add_instance(self) -> Instance:
        """Waits until the pod with the frontend and the backend is ready, and returns it."""
        instance = Instance(self._pod_uid, self.paths.run_dir / self._pod_uid / "state.sock")
        wait_for("both drivers", lambda: not self.unready(instance), _STARTING)
        return instance


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.demo.compose", description=__doc__)
    for name in _SHARED:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, required=True)
    parser.add_argument("--pod-uid", required=True, help="the pod UID that both drivers use")
    parser.add_argument("--node", required=True)
    return parser.parse_args()


def main() -> int:
    """Runs the demo until it is interrupted and returns the exit status."""
    given = vars(_arguments())
    pod_uid, node = given.pop("pod_uid"), given.pop("node")
    end_by_interrupt()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="dn-") as base,
            SharedStage(Paths.below(Path(base), **given), pod_uid, node) as stage,
        ):
            while True:
                say(f"\nShown: {play(stage)}\n\n{'-' * 100}")
                sys.stdout.flush()
                time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return 0
    except (UnexpectedStateError, StageError, AnsweredError, OSError) as error:
        sys.stdout.flush()
        print(f"\ndemo: failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
