# SPDX-License-Identifier: Apache-2.0
"""Runs docs/quickstart.md unchanged, and the cluster queries on other pages ("make quickstart-check")."""

import re
from functools import partial

import pytest
from numa_contract.cpuset import parse_cpu_list

from tests.chart.test_shown_commands import PAGES, lines
from tests.quickstart.conftest import Shell
from tests.rigs import command_blocks as documented

pytestmark = pytest.mark.timeout(300)
STEPS = [step for block in documented.blocks("quickstart", documented.CLUSTER) for step in block.commands()]


_CPUS = r"(?<![\w.-])\d+(?:[-,]\d+)+"


def pattern(shown: str, known: dict[str, str]) -> re.Pattern[str]:
    """Returns a pattern for equivalent output: random suffixes, column widths and CPUs may differ, but the same CPU
    list on the page must stand for the same CPUs wherever it appears. ``known`` maps each list on the page to the CPUs
    that an earlier output showed for it.
    """
    words = []
    for word in shown.split():
        text = re.sub(r"-[a-z0-9]{5}$", r"-[a-z0-9]{5}", re.escape(word))
        words.append(re.escape(known[word]) if word in known else f"({_CPUS})" if re.fullmatch(_CPUS, word) else text)
    return re.compile(" ".join(words))


def matches(wanted: re.Pattern[str], printed: str) -> re.Match[str] | None:
    """Finds the expected output, whatever the widths of its columns."""
    return wanted.search(" ".join(printed.split()))


def test_every_step_prints_what_the_page_shows(shell: Shell) -> None:
    """Starting from nothing, a new user gets exclusive CPUs, and each step prints the output on the page."""
    assert len(STEPS) > 7
    known: dict[str, str] = {}
    for command, shown in STEPS:
        wanted = pattern(shown, known)
        command = command.replace("REGISTRY", "registry.example")
        may_change = not {"get", "numa"}.isdisjoint(command.split())
        printed = shell.until(command, partial(matches, wanted)) if may_change else shell.typed(command)
        found = matches(wanted, printed)
        assert found, f"{command}\n{printed}"
        known |= zip([word for word in shown.split() if re.fullmatch(_CPUS, word)], found.groups(), strict=False)
    assert len(parse_cpu_list(known["0-1,16-17"])) == 4, "the claim has four CPUs"


def test_the_page_about_the_plugin_shows_its_output(shell: Shell) -> None:
    """The page's samples come from the cluster where the quickstart has started its pod."""
    text = (documented.DOCS / "kubectl-numa.md").read_text().replace(' "', " ").replace('",', " ").replace('"\n', "\n")
    steps = [step for block in documented.blocks_of("kubectl-numa", text) for step in block.commands() if step[1]]
    assert len(steps) > 3
    for command, shown in steps:
        printed = shell.typed(command).replace(' "', " ").replace('",', " ").replace('"\n', "\n")
        assert matches(pattern(shown, {}), printed), f"{command}\n{printed}"


def test_the_page_about_the_state_endpoint_shows_its_responses(shell: Shell) -> None:
    """The page's samples come from the same node. The claim's UID differs between clusters."""
    steps = [step for block in documented.blocks("state-endpoint") for step in block.commands() if step[1]]
    assert steps
    for command, shown in steps:
        printed = shell.typed(command.replace("/run/dra-driver-numa", str(shell.stage.paths.run_dir)))
        alike = [re.sub(r'"claimUid":"[^"]+"|-[a-z0-9]{5}"', "...", text).split() for text in (shown, printed)]
        assert alike[0] == alike[1], f"{command}\n{printed}"


def asked() -> list[str]:
    """Returns the cluster queries on the pages that a cluster of fakes can answer.

    Pages whose blocks are all run are left out, because they have their own tests. The command reference is left out,
    because its examples name invented pods; a test of the help texts shows that the programs accept these examples.
    """
    pages = [page for page in PAGES if page.stem not in (*documented.PAGES, "command-reference")]
    # Leave out the samples from nodes with a fault, which are marked in this way:
    # tests/integration/test_symptoms_page.py tests them.
    texts = [re.sub(r"<!-- output: .*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in pages]
    found = {line.strip() for text in texts for line in lines(text)}
    mine = re.compile(r"kubectl (-n \S+ )?(get|exec|describe|rollout status|numa)\b(?!.*(/proxy/| page |krew))")
    return sorted(line for line in found if mine.match(line))


def test_documented_queries_are_answered(shell: Shell) -> None:
    """A query copied from any page works, and on a healthy node it reports no problem."""
    driver = shell.typed("kubectl -n dra-driver-numa get pods -o name").strip().removeprefix("pod/")
    assert len(asked()) > 7
    for line in [*asked(), "kubectl numa nodes", "kubectl numa claims"]:
        command = line.replace("explain POD", "explain cpus").replace("NODE", "node-1")
        command = re.sub(r"\b(DRIVER-)?POD\b", driver, command)
        command = command.replace("describe pod ", "-n dra-driver-numa describe pod ")
        assert "PROBLEM" not in shell.typed(command.replace("> node.tar.gz", "| wc -c"))


def test_the_last_step_removes_everything(shell: Shell) -> None:
    """The page's last command deletes the pod with its claim; uninstalling removes the driver."""
    [command] = re.findall(r"`(kubectl delete [^`]+)`", (documented.DOCS / "quickstart.md").read_text())
    assert 'pod "cpus" deleted' in shell.typed(command)
    uninstalled = shell.typed("helm uninstall dra-driver-numa -n dra-driver-numa")
    assert uninstalled.strip() == 'release "dra-driver-numa" uninstalled'
    assert shell.typed("kubectl get daemonsets,configmaps,deviceclasses -A -o name") == ""
