# SPDX-License-Identifier: Apache-2.0
"""An NRI plugin that responds to CreateContainer with the resources given as JSON in one of the container's environment
variables.

It shows how a runtime handles a response, independently of the driver: `python -m tests.node.rig.answering_plugin`.
"""

import asyncio
from typing import Final

from google.protobuf.json_format import Parse
from google.protobuf.message import Message

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.nri_peer import other_plugin
from tests.node.rig.node import NRI_SOCKET

VARIABLE: Final = "ANSWER"
_CREATE_CONTAINER: Final = 1 << (pb.CREATE_CONTAINER - 1)


async def create(payload: bytes) -> Message:
    """Responds to CreateContainer with the resources in the container's environment variable."""
    answer = pb.CreateContainerResponse()
    for variable in pb.CreateContainerRequest.FromString(payload).container.env:
        if variable.startswith(f"{VARIABLE}="):
            Parse(variable.removeprefix(f"{VARIABLE}="), answer.adjust.linux.resources)
    return answer


async def synchronize(payload: bytes) -> Message:
    """Prints a message once the runtime has sent its state."""
    print("synchronised", flush=True)
    return pb.SynchronizeResponse(more=pb.SynchronizeRequest.FromString(payload).more)


async def main() -> None:
    """Serves until it is killed."""
    methods = {"CreateContainer": create, "Synchronize": synchronize}
    async with other_plugin(NRI_SOCKET, name="answering", events=_CREATE_CONTAINER, **methods):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
