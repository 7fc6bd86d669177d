# SPDX-License-Identifier: Apache-2.0
"""Prints the functions that the frontend calls for one Prepare: ``python -m hack.trace``.

Starts the driver in the test environment of ``tests/stage``, prepares claims with one CPU request each, and prints the
functions that the frontend calls for the last of them, from the kubelet's call to the response. Comprehensions and
lambdas are left out. A module in which only these are called is still listed, without any functions.
"""

import os
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tests.rigs.trees import captured, write_tree
from tests.stage.pods import claim_pod, cpus, memory
from tests.stage.process import wait_for
from tests.stage.settings import OUR_FRONTEND, StageSettings
from tests.stage.stage import Stage

_MACHINE = "128arm-2pa2n8cluster4co"
_WARM_UP_REQUESTS = 3
_OURS = ("dra_frontend", "nri_backend", "numa_contract", "numa_node", "numa_tools")


class CallTrace:
    """Functions called for one request, in the order in which they were first called."""

    def __init__(self) -> None:
        self.running = False
        self.calls = 0
        self.modules: dict[str, dict[str, None]] = {}
        """Names of functions by module. This is a dictionary because dictionaries preserve the order."""
        self.reentrant_calls: dict[str, None] = {}
        """Calls from one module back into another that already has a function further up the stack, as messages."""
        self.waiting: tuple[str, ...] = ()
        """Modules of the functions that are waiting for the thread that makes the calls, outermost first."""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Records a call. This is a profile function, to be installed with ``sys.setprofile``."""
        if self.running and event == "call" and (module := _module(frame)):
            functions, name = self.modules.setdefault(module, {}), frame.f_code.co_qualname
            if not name.endswith(">"):
                self.calls += 1
                functions[name] = None
                modules_above = (*self.waiting, *callers(frame.f_back))
                if module in modules_above[:-1] and modules_above[-1] != module:
                    self.reentrant_calls[f"{modules_above[-1]} calls {module}: {name}"] = None

    def __str__(self) -> str:
        shown = [f"{module}: {', '.join(names)}" for module, names in self.modules.items()]
        packages = Counter(module.partition(".")[0] for module in self.modules)
        package_counts = ", ".join(f"{count} of {package}" for package, count in packages.most_common())
        functions = sum(map(len, self.modules.values()))
        total = f"{functions} functions, {self.calls} calls, {len(self.modules)} modules ({package_counts})"
        return "\n".join([*shown, *(f"reentrant: {call}" for call in self.reentrant_calls), total])


def callers(frame: FrameType | None) -> tuple[str, ...]:
    """Returns the modules of the functions in a frame and its callers' frames, outermost first."""
    found: list[str] = []
    while frame is not None:
        found += filter(None, [_module(frame)])
        frame = frame.f_back
    return tuple(reversed(found))


def _module(frame: FrameType) -> str:
    """Returns the module of one of the driver's functions, or "" for any other function.

    Generated code, such as the methods of a dataclass and gRPC messages, is left out, since it has no source file.
    """
    if frame.f_code.co_filename.startswith("<"):
        return ""
    module = str(frame.f_globals.get("__name__", ""))
    package, _, rest = module.partition(".")
    return module if package in _OURS and not rest.startswith("_pb") else ""


def main() -> None:
    """Prints the functions called for one request or, with ``--aligned``, for a claim that requests aligned CPUs and
    memory.
    """
    requests = [cpus(1), memory("16Mi")] if "--aligned" in sys.argv[1:] else [cpus(1)]
    with tempfile.TemporaryDirectory() as directory:
        written = Path(directory, "traces")
        command = OUR_FRONTEND.replace("-m numa_tools", f"-m hack.traced_frontend {shlex.quote(os.fspath(written))}")
        machine = write_tree(captured(_MACHINE), Path(directory, "machine"))
        with Stage(StageSettings(host_root=machine, frontend=command, partitions=True)) as stage:
            stage.add_ready_instance()
            for number in range(_WARM_UP_REQUESTS + 1):
                with claim_pod(stage, f"pod-{number}", *requests) as pod:
                    written.write_text("")
                    pod.prepare()
                    wait_for("the traces", lambda: written.read_text().count("\n\n") == len(requests))
        print(written.read_text().rstrip())


if __name__ == "__main__":
    main()
