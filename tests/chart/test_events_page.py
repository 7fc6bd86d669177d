# SPDX-License-Identifier: Apache-2.0
"""docs/events.md contains the reason, the object and the message of every Event that the driver records."""

import re
import time

import pytest
from dra_frontend.claims import memory_kills, pod_events
from dra_frontend.claims.backend import BackendView
from dra_frontend.publishing import plan
from dra_frontend.publishing.writer import _GATE_OFF
from numa_contract.config import Config
from numa_contract.reports import BackendStatus
from numa_contract.state.status import StatusCode

from tests.chart.helm import CHART
from tests.rigs import builders

PAGE = (CHART.parents[1] / "docs/events.md").read_text()
SECTION = PAGE.split("## Texts\n")[1].split("\n## ")[0]
_FOUND = re.findall(r"^\* `(\w+)`: `([^`]+)`", SECTION, re.MULTILINE)
PATTERNS = [(reason, " ".join(text.split())) for reason, text in _FOUND]
ROWS = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
POD_REASONS = {pod_events.BEST_EFFORT, pod_events.KEPT_BY_POOL, memory_kills.REASON}


def of_pods() -> list[tuple[str, str]]:
    """Returns the Events about pods with their messages."""
    box = builders.report(
        "c", fallbackReason="cpuset.cpus.partition says root invalid", cgroup="/kubepods/besteffort/p/c"
    )
    found = [(one.reason, one.note) for one in pod_events._observations(box)]
    uses = [{"driver": "dra.memory", "uid": "u", "requests": ["memory"]}]
    killed = builders.report("c", claims=uses, mems="1")
    for parameters in ({"limit": "claim"}, {}, {"binding": "preferred"}):
        record = builders.memory_record("u", ("memory", 1, 1 << 30, 4096), memory=parameters)
        found.append((memory_kills.REASON, memory_kills.kill_note(killed, [record], "node-a")))
    return found


def of_nodes() -> list[tuple[str, str]]:
    """Returns the Events about nodes with their messages, except those that only contain a response from the API
    server.
    """
    found = list[tuple[str, str]]()
    for exclusivity in ("auto", "partition"):
        view = BackendView(time.monotonic, Config(cpu_exclusivity=exclusivity))
        status = BackendStatus(instance="b", exclusivity="pool", exclusivity_reason="x", kubelet_pins=("cpu",))
        view.renew(status, [])
        found += [(str(one.code), one.text) for one in view.conditions]
    noted = plan.notes([plan.LISTS_REFUSED, plan.MAPPING_REFUSED], ["spec.devices.taints"], conditions=False)
    found += [(str(reason), f"dra.cpu: {text}") for reason, text in noted.items()]
    found.append((str(StatusCode.FEATURE_GATE_MISSING), f"dra.cpu: slices not published: {_GATE_OFF}"))
    return found


@pytest.mark.parametrize(("reason", "text"), list(dict.fromkeys([*of_pods(), *of_nodes()])))
def test_the_page_contains_the_messages(reason: str, text: str) -> None:
    """Readers can search the page for the message that kubectl shows."""
    patterns = [re.escape(pattern).replace(r"\.\.\.", ".+") for its, pattern in PATTERNS if its == reason]
    assert any(re.fullmatch(pattern, text) for pattern in patterns), (text, patterns)


def test_the_page_contains_no_obsolete_message() -> None:
    """A message that the driver no longer uses must be removed from the page."""
    known = [*of_pods(), *of_nodes(), ("ResourceSlicesNotPublished", "dra.cpu: slices not published: forbidden")]
    for reason, pattern in PATTERNS:
        expression = re.escape(pattern).replace(r"\.\.\.", ".+")
        assert any(its == reason and re.fullmatch(expression, text) for its, text in known), pattern


def test_every_reason_has_an_object_and_a_message() -> None:
    """The object determines who sees an Event: the pod's author, or the node's operator."""
    described = set(re.findall(r"^\* `(\w+)`: ", SECTION, re.MULTILINE))
    assert described == set(ROWS)
    assert {reason for reason, about in ROWS.items() if about == "pod"} == POD_REASONS
    assert {reason for reason, about in ROWS.items() if about == "node"} == set(ROWS) - POD_REASONS
    assert set(ROWS) - POD_REASONS <= set(map(str, StatusCode))


def test_no_message_contains_a_uid() -> None:
    """Messages identify pods and claims by namespace and name."""
    for _, text in [*of_pods(), *of_nodes()]:
        assert not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-", text)
