# SPDX-License-Identifier: Apache-2.0
"""The journey of one prepare through the code: ``python -m hack.trace``.

One claim with one CPU request, warm, without API server and metadata. Counted are distinct functions, comprehensions
and lambdas left out, and the modules that they are in.
"""

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from dra_frontend._pb import dra_v1_pb2 as pb
from dra_frontend.kubelet.dra import DraService, claim_names, prepare_response

from tests.rigs.builders import claim, cpus
from tests.rigs.frontend import Frontend

_WARM = 3


class Journey:
    """The functions that were called, in the order of their first calls."""

    def __init__(self) -> None:
        self.running = False
        self.calls = 0
        self.functions: dict[tuple[str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Takes note of a call, as ``sys.setprofile`` wants it."""
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if self.running and event == "call" and "/src/" in path and "/_pb/" not in path and not name.endswith(">"):
            self.calls += 1
            self.functions[path.partition("/src/")[2].removesuffix(".py").replace("/", "."), name] = None

    def __str__(self) -> str:
        modules: dict[str, list[str]] = {}
        for module, name in self.functions:
            modules.setdefault(module, []).append(name)
        shown = [f"{module}: {', '.join(names)}" for module, names in modules.items()]
        packages = Counter(module.partition(".")[0] for module in modules)
        of = ", ".join(f"{count} of {package}" for package, count in packages.most_common())
        total = f"{len(self.functions)} functions, {self.calls} calls, {len(modules)} modules ({of})"
        return "\n".join([*shown, total])


class _Context:
    """A call of the kubelet that has time."""

    def time_remaining(self) -> float:
        """Returns seconds."""
        return 40.0


async def _prepare(journey: Journey, path: Path) -> None:
    node = Frontend(path, None, *(claim(f"u{number}", cpus(1)) for number in range(_WARM + 1)))
    await node.store.start()
    service = DraService("dra.cpu", node.claims)
    for number in range(_WARM + 1):
        name = pb.Claim(namespace="ns", name=f"claim-u{number}", uid=f"u{number}")
        asked = pb.NodePrepareResourcesRequest(claims=[name])
        journey.running = number == _WARM
        prepare_response(await service.answer("prepare", claim_names(asked), _Context()))
        journey.running = False
        await node.unprepare(f"u{number}")


def main() -> None:
    """Prints the journey."""
    journey = Journey()
    threading.setprofile(journey)
    sys.setprofile(journey)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_prepare(journey, Path(directory)))
    sys.setprofile(None)
    print(journey)


if __name__ == "__main__":
    main()
