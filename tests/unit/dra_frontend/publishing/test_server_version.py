# SPDX-License-Identifier: Apache-2.0
"""The API server's release decides in which form claims are counted against the node."""

import asyncio

import pytest
from dra_frontend.api_server.errors import ForbiddenError, KubeError, UnavailableError
from dra_frontend.api_server.requests import server_version
from dra_frontend.devices.allocatable import MappingForm
from dra_frontend.publishing.server_version import ServerRelease
from dra_frontend.publishing.status import Notice, Timing

QUICK = Timing(first_retry=0.001, longest_retry=0.001)


class Server:
    """Answers in turn; the last answer stays. Keeps what is notified."""

    def __init__(self, *answers: tuple[int, int] | KubeError) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.notices: list[Notice] = []

    async def get_version(self) -> tuple[int, int]:
        """The next answer."""
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, KubeError):
            raise answer
        return answer

    async def notify(self, notice: Notice) -> None:
        """Takes note."""
        self.notices.append(notice)

    def release(self, *, enabled: bool = True) -> ServerRelease:
        """One that asks this server, often."""
        return ServerRelease(self, self.notify, enabled=enabled, timing=QUICK, look_seconds=0.001)


AWAY = UnavailableError("get version", "connection refused")


async def test_not_enabled_nobody_is_asked() -> None:
    """The default costs no request."""
    server = Server((1, 37))
    release = server.release(enabled=False)
    await release.learn()
    assert (release.mapping, server.asked) == (None, 0)


async def test_an_outage_is_waited_out() -> None:
    """Slices are first written in the right form, not in none and then again."""
    server = Server(AWAY, AWAY, (1, 36))
    release = server.release()
    await release.learn()
    assert (release.mapping, server.notices) == (MappingForm.V1_36, [])


@pytest.mark.parametrize(
    "answer", [(1, 35), (0, 0), ForbiddenError("get version", "no", 'nonResourceURLs: ["/version"]')]
)
async def test_without_an_effect_it_is_said_once(answer: tuple[int, int] | KubeError) -> None:
    """An older server, one that does not tell or will not: the operator who switched it on gets one Event."""
    server = Server(answer)
    release = server.release()
    for _ in range(2):
        await release.learn()
    (notice,) = server.notices
    assert release.mapping is None
    assert notice.reason == "NodeAllocatableMappingUnsupported"
    assert "publishNodeAllocatableResourceMapping" in notice.note


async def test_an_upgrade_of_the_server_is_followed() -> None:
    """The form changes under the running driver; what stays the same, or cannot be asked, changes nothing."""
    server = Server((1, 36), (1, 36), AWAY, (1, 37))
    release = server.release()
    await release.learn()
    changed = asyncio.Event()
    forms: list[MappingForm | None] = []

    def note() -> None:
        forms.append(release.mapping)
        changed.set()

    following = asyncio.create_task(release.follow(note))
    async with asyncio.timeout(5):
        await changed.wait()
    await asyncio.sleep(0.02)
    following.cancel()
    assert forms == [MappingForm.V1_37]


@pytest.mark.parametrize(
    ("document", "version"),
    [
        ({"major": "1", "minor": "36"}, (1, 36)),
        ({"major": "1", "minor": "37+"}, (1, 37)),
        ({"major": "1", "minor": "36-gke.2"}, (1, 36)),
        ({"major": 1, "minor": 36}, (1, 36)),
        ({"major": "", "minor": ""}, (0, 0)),
        ({}, (0, 0)),
    ],
)
def test_versions_as_vendors_write_them(document: dict[str, object], version: tuple[int, int]) -> None:
    """The number counts, whatever stands behind it."""
    assert server_version(document) == version
