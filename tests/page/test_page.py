# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: captured machines of 2 to 128 CPUs and a generated one of 512, in light and dark mode."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from dra_frontend.state_endpoint.page import LOOPBACK, browser_endpoints
from dra_frontend.state_endpoint.ports import LocalOnly, port_application
from dra_frontend.state_endpoint.server import serve_port
from starlette.responses import Response

from tests.page.browser import Tab, chromium
from tests.rigs.node_state import HOSTILE, LARGEST, NodeState, populated
from tests.rigs.trees import NAMES

PICTURES = Path(__file__).parents[2] / "build" / "page"
CHECKS = Path(__file__).with_name("checks.js").read_text().strip()
MIDDLE = "64fake-4n2s2ca2c2t"


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    """Yields a browser tab. The test fails if the page has reported an error by the end."""
    async with chromium(tmp_path) as tab:
        await tab.screen(1280, 900, "light")
        yield tab
        assert tab.errors == []


@asynccontextmanager
async def served(state: NodeState, tab: Tab, asked: Counter[str] | None = None) -> AsyncIterator[None]:
    """Serves a node, counts the requests, and opens the page."""

    def counting(path: str, look: Callable[[], Response]) -> Callable[[], Response]:
        def counted() -> Response:
            if asked is not None:
                asked[path] += 1
            return look()

        return counted

    endpoints = {path: counting(path, look) for path, look in browser_endpoints(state).items()}
    async with serve_port((LOOPBACK, 0), LocalOnly(port_application(endpoints))) as port:
        await tab.open(f"http://localhost:{port}/")
        yield


def save(name: str, picture: bytes) -> None:
    """Saves a picture for manual inspection."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / f"{name}.png").write_bytes(picture)


async def details(tab: Tab) -> str:
    """Returns the page's text about the selected element."""
    return str(await tab.evaluate("document.querySelector('#details div').innerText"))


async def find(tab: Tab, text: str) -> str:
    """Types into the search field and returns the page's response."""
    typed = f"q.value = {json.dumps(text)}; q.dispatchEvent(new Event('input', {{bubbles: true}}))"
    await tab.evaluate(f"{{const q = document.querySelector('#query'); {typed}}}")
    return await details(tab)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", [*NAMES, LARGEST])
async def test_every_machine_is_drawn(tab: Tab, name: str, scheme: str) -> None:
    """Every CPU is drawn once, all text has a contrast of 4.5 to 1 (WCAG 1.4.3), and nothing is wider than the
    window.
    """
    state = populated(name)
    machine = state.watch.machine
    async with served(state, tab):
        for width in (1280, 400):
            await tab.screen(width, 900, scheme)
            drawn = await tab.evaluate("[...document.querySelectorAll('button[data-cpu]')].map((b) => +b.dataset.cpu)")
            assert sorted(drawn) == sorted(machine.online | machine.offline)
            assert await tab.evaluate(f"{CHECKS}.faint()") == []
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            save(f"{name}-{scheme}-{width}", await tab.picture())


async def test_the_page_is_accessible(tab: Tab) -> None:
    """Every focusable element has a role and a name, no heading level is skipped, and the uses of CPUs are marked with
    different letters, not only with different colours.
    """
    async with served(populated(LARGEST), tab):
        tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        roles = {"button", "link", "searchbox", "table", "rowheader", "columnheader", "heading", "region", "group"}
        named = [one for one in tree if not one["ignored"] and one["role"]["value"] in roles - {"table"}]
        assert len(named) > 512
        assert [one for one in named if not one["name"]["value"].strip()] == []
        levels = await tab.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((h) => +h.tagName[1])")
        assert all(below <= above + 1 for above, below in pairwise(levels))
        marks = await tab.evaluate(
            "[...document.querySelectorAll('#key tbody .cpu')].map((one) => one.innerText.trim())"
        )
        assert len(marks) == len(set(marks)) == 6


async def test_the_page_can_be_used_with_the_keyboard(tab: Tab) -> None:
    """Tab skips the CPUs in one step, arrow keys move among them, Enter selects, Escape clears."""
    where = "((one) => one.dataset.cpu ?? (one.id || one.className))(document.activeElement)"
    async with served(populated(MIDDLE), tab):
        order = []
        for _ in range(4):
            await tab.press("Tab")
            order.append(await tab.evaluate(where))
        assert order == ["skip", "query", "0", "name"]
        await tab.evaluate("document.querySelector('button[data-cpu]').focus()")
        reached = []
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "End", "Home"):
            await tab.press(key)
            reached.append(await tab.evaluate(where))
        assert reached == ["4", "1", "9", "1", "4", "63", "0"]
        await tab.press("ArrowRight")
        await tab.press("Enter")
        assert "CPU 4" in await details(tab)
        assert await tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await tab.press("Escape")
        assert "Arrow keys" in await details(tab)


async def test_cpus_pods_and_claims_can_be_looked_up(tab: Tab) -> None:
    """The page shows which container uses a CPU, which resources a pod has, whether a claim is enforced, and which
    resources of a NUMA node are free.
    """
    async with served(populated(MIDDLE), tab):
        text = await find(tab, "2")
        assert "ml-team/train-2" in text
        assert "isolated" in text
        assert "core shared with CPU 6" in text
        assert "worker of ns/train-2-0" in text
        assert await tab.evaluate("document.querySelectorAll('button.cpu.chosen').length") == 2
        for scheme in ("dark", "light"):
            await tab.screen(1240, 700, scheme)
            assert await tab.evaluate(f"{CHECKS}.faint()") == []
            save(f"selected-{scheme}", await tab.picture(whole=False))
        assert "web of shop/web-1" in await find(tab, "web-1")
        assert "no: container worker" in await find(tab, "train-4")
        assert "no CPU 999" in await find(tab, "999")
        assert "Nothing matches" in await find(tab, "nobody")
        free = "document.querySelector('[data-node=\"1\"] h4 small').innerText"
        assert await tab.evaluate(free) == "10 of 16 CPUs free"


async def test_a_hostile_name_is_shown_as_text(tab: Tab) -> None:
    """A container whose name is markup is shown by that name, and no part of it is run or loaded."""
    async with served(populated(MIDDLE), tab):
        assert HOSTILE in await find(tab, "<img")
        assert await tab.evaluate("document.images.length") == 0


async def test_the_page_is_live_while_it_is_visible(tab: Tab) -> None:
    """A change is shown within seconds and the focus is kept; a hidden page sends no requests; an unreachable service
    is reported.
    """
    state, asked = populated(MIDDLE), Counter[str]()
    async with served(state, tab, asked):
        await tab.evaluate("document.querySelector('button[data-cpu=\"9\"]').focus()")
        state.problems = ["dra.cpu: not registered with the kubelet"]
        await tab.until("document.querySelector('#problems').innerText.includes('not registered')")
        assert await tab.evaluate("document.activeElement.dataset.cpu") == "9"
        show = "Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {hidden}}})"
        turn = "document.dispatchEvent(new Event('visibilitychange'))"
        await tab.evaluate(f"{show.format(hidden='true')}; {turn}")
        before = asked["/v1/node"]
        await asyncio.sleep(5)
        assert asked["/v1/node"] <= before + 1
        await tab.evaluate(f"{show.format(hidden='false')}; {turn}")
        await tab.until("document.querySelector('#live').innerText.startsWith('Live')")
    await tab.until("document.querySelector('#live').innerText.startsWith('Not live')")
    assert await tab.evaluate("document.querySelector('#live').getAttribute('role')") == "alert"
    tab.errors.clear()  # the browser's own message about the missing response
