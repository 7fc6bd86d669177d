# SPDX-License-Identifier: Apache-2.0
"""docs/quickstart.md, typed as it stands, with real kubectl and Helm, in a cluster of fakes; "make quickstart-check".

KUBECTL names the kubectl; it executes by WebSocket, as 1.31 and later do.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from numa_contract.cpuset import parse_cpu_list

from hack.plugin import main as make_plugin
from tests.chart.helm import HELM
from tests.chart.test_shown_commands import PAGES, lines
from tests.fakes.waiting import PATIENCE
from tests.rigs.trees import captured, write_tree
from tests.stage.cluster import Cluster
from tests.stage.machine import HostDirectory
from tests.stage.process import ROOT
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage

PAGE = (ROOT / "docs/quickstart.md").read_text()
_SECONDS = 60.0 * PATIENCE


def steps() -> list[tuple[str, str]]:
    """Every command of the page with what the page says it prints."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for one in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, shown = one.partition("\n")
            found.append((command, shown))
    return found


_CPUS = r"(?<![\w.-])\d+(?:[-,]\d+)+"


def pattern(shown: str, known: dict[str, str]) -> re.Pattern[str]:
    """Output that is alike: random suffixes, widths of columns and CPUs may differ, but one CPU list of the page stands
    for the same CPUs everywhere (``known``, once they have been seen)."""
    words = []
    for word in shown.split():
        text = re.sub(r"-[a-z0-9]{5}$", r"-[a-z0-9]{5}", re.escape(word))
        words.append(re.escape(known[word]) if word in known else f"({_CPUS})" if re.fullmatch(_CPUS, word) else text)
    return re.compile(" ".join(words))


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user's shell, in front of a cluster with one node that has nothing installed."""
    root = write_tree(captured("32intel64-2p8co2t+8ve"), tmp_path_factory.mktemp("machine"))
    machine = HostDirectory(root)
    machine.claim_to_be_here()
    for node in (0, 1):
        machine.set_pages(node, 0, 0)
    tools = tmp_path_factory.mktemp("bin")
    for name, program in (("helm", HELM), ("kubectl", Path(os.environ["KUBECTL"]))):
        (tools / name).symlink_to(program)
    assert make_plugin([str(tools)]) == 0
    with ExitStack() as stack:
        stage = stack.enter_context(Stage(StageSettings(host_root=root, node="node-1", partitions=True, classes={})))
        cluster = stack.enter_context(Cluster(stage))
        home = {"HOME": str(tools), "PATH": f"{tools}:{os.environ['PATH']}", "KUBECONFIG": str(stage.paths.kubeconfig)}
        yield os.environ | home
        print(stage.logs(), *cluster.failures, sep="\n")


def typed(command: str, shell: dict[str, str]) -> str:
    """What a command prints; it ends well."""
    command = command.replace("REGISTRY", "registry.example")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env=shell,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_step_prints_what_the_page_shows(shell: dict[str, str]) -> None:
    """A new user gets from nothing to exclusive CPUs, and sees what he should see at each step."""
    assert len(steps()) > 7
    known: dict[str, str] = {}
    for command, shown in steps():
        deadline, wanted = time.monotonic() + _SECONDS, pattern(shown, known)
        # What the node publishes takes a few seconds: who looks too early looks again.
        while not (found := wanted.search(" ".join((printed := typed(command, shell)).split()))):
            assert "get" in command.split(), f"{command}\n{printed}"
            assert time.monotonic() < deadline, f"{command}\n{printed}"
            time.sleep(0.5)
        known |= zip([word for word in shown.split() if re.fullmatch(_CPUS, word)], found.groups(), strict=False)
    assert len(parse_cpu_list(known["1-2,17-18"])) == 4, "of one claim for four CPUs"


def asked() -> list[str]:
    """What pages ask a cluster, with kubectl and its plugin, that a cluster of fakes can answer."""
    found = {line.strip() for page in PAGES for line in lines(page.read_text())}
    mine = re.compile(r"kubectl (-n \S+ )?(get|exec|describe|rollout status|numa)\b(?!.*(/proxy/| page |krew))")
    return sorted(line for line in found if mine.match(line) and line not in [command for command, _ in steps()])


def test_what_pages_ask_is_answered(shell: dict[str, str]) -> None:
    """Whoever copies a line from any page gets an answer; on a node that is well, no command finds a problem."""
    driver = typed("kubectl -n dra-driver-numa get pods -o name", shell).strip().removeprefix("pod/")
    assert len(asked()) > 10
    for line in [*asked(), "kubectl numa nodes", "kubectl numa explain cpus", "kubectl numa doctor NODE"]:
        command = re.sub(r"\b(DRIVER-)?POD\b", driver, line).replace("NODE", "node-1")
        command = command.replace("describe pod ", "-n dra-driver-numa describe pod ")
        assert "PROBLEM" not in typed(command.replace("> node.tar.gz", "| wc -c"), shell)


def test_the_end_leaves_nothing(shell: dict[str, str]) -> None:
    """Deleted as the page says, the pod gives its claim back, and the driver goes."""
    [command] = re.findall(r"`(kubectl delete [^`]+)`", PAGE)
    assert 'pod "cpus" deleted' in typed(command, shell)
    assert (
        typed("helm uninstall dra-driver-numa -n dra-driver-numa", shell).strip()
        == 'release "dra-driver-numa" uninstalled'
    )
    assert typed("kubectl get daemonsets,configmaps,deviceclasses -A -o name", shell) == ""
