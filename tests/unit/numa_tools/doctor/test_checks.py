# SPDX-License-Identifier: Apache-2.0
"""Every check on a healthy node and on a node with one fault, with real files, real sockets and an API server."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dra_frontend.devices.inventory import MismatchKind
from numa_contract.config import ConfigError
from numa_contract.records import PoolCpus
from numa_contract.state.status import Notice, StatusCode
from numa_tools import cli
from numa_tools.causes import remedy_of
from numa_tools.doctor.checks.configuration import _REMEDIES
from numa_tools.doctor.facts import KubeletConfig, Right, Service
from numa_tools.doctor.gather import gather
from numa_tools.doctor.model import Check, Level, Unread, problem, unknown
from numa_tools.doctor.sources.inquiry import RIGHTS
from numa_tools.doctor.table import CHECKS, Verdict, examine, report
from numa_tools.doctor.text import findings_text

from tests.rigs.faulty_node import FaultyNode
from tests.unit.numa_tools.doctor.faults import FAULTS, UNKNOWN_CLAIM

ROOT = Path(__file__).parents[4]


@pytest.fixture
def node() -> Iterator[FaultyNode]:
    """Returns a healthy node."""
    made = FaultyNode()
    yield made
    made.close()


async def verdicts(node: FaultyNode) -> dict[str, Verdict]:
    """Returns the checks' verdicts, keyed by the check's ID."""
    async with node.up() as settings:
        facts = await gather(settings)
    return {one.check.id: one for one in examine(node.edit(facts))}


async def test_a_healthy_node_has_no_findings(node: FaultyNode) -> None:
    """The summary reports that every check passed."""
    found = await verdicts(node)
    assert {name: one.findings for name, one in found.items() if one.result != "good"} == {}
    assert findings_text([*found.values()], "n") == f"n: {len(CHECKS)} good (out of {len(CHECKS)} checks)"


def test_each_check_detects_at_least_one_fault() -> None:
    """A check that never fails would be useless. Check IDs are unique."""
    assert sorted(check.id for check in CHECKS) == sorted({check_of(name) for name in FAULTS})


def check_of(fault: str) -> str:
    """Returns the ID of the check that finds the fault."""
    return fault.partition("/")[0]


@pytest.mark.parametrize("name", FAULTS)
async def test_each_fault_is_found(name: str, node: FaultyNode) -> None:
    """The check reports the fault in complete sentences, and no check raises an exception."""
    FAULTS[name](node)
    found = await verdicts(node)
    findings = [one for one in found[check_of(name)].findings if one.level is not Level.UNKNOWN]
    assert findings, {other: one.findings for other, one in found.items() if one.result != "good"}
    for one in findings:
        assert one.what.endswith(".")
        assert one.why
        assert one.remedy
        assert "\n" not in "".join((one.what, one.why, one.remedy, *one.evidence))
    failed = [one for verdict in found.values() for one in verdict.findings if "check itself failed" in one.why]
    assert failed == []


def _speaks_no_http(node: FaultyNode) -> None:
    node.serving = False
    node.listen(node.run / "pod-uid/state.sock")
    node.sockets[-1].close()


def _own_cgroup(node: FaultyNode) -> None:
    shutil.rmtree(node.base / "cgroup/kubepods.slice")
    node.cgroup("cgroup.events", "")


def _foreign_tree(node: FaultyNode) -> None:
    (node.base / "cgroup/cgroup.controllers").unlink()
    node.host("/proc/self/mountinfo", f"30 23 0:26 / {node.base}/cgroup rw - tmpfs tmpfs rw\n")


UNREADABLE: dict[str, tuple[Callable[[FaultyNode], object], str]] = {
    "containerd's file": (lambda node: node.host("/etc/containerd/config.toml", "["), "runtime.drop-in"),
    "an import cycle": (
        lambda node: node.host(
            "/etc/containerd/config.toml", 'imports = ["*.toml", "/etc/containerd/conf.d/*"]\nx = "'
        ),
        "runtime.drop-in",
    ),
    "the kubelet's file": (lambda node: node.kubelet_of.update(reservedSystemCPUs="9-1"), "kubelet.gates"),
    "a kernel file": (lambda node: node.host("/proc/sys/fs/file-nr", "many"), "host.node-files"),
    "the cgroup tree": (lambda node: shutil.rmtree(node.base / "cgroup"), "kernel.cgroup-v2"),
    "another file system in place of the cgroup tree": (_foreign_tree, "kernel.cgroup-v2"),
    "a container's own cgroup": (
        _own_cgroup,
        "kernel.kubepods",
    ),
    "the kubelet's registry": (
        lambda node: shutil.rmtree(node.kubelet_root / "plugins_registry"),
        "kubelet.registration",
    ),
    "the state socket": (_speaks_no_http, "driver.status"),
    "the node's slices": (lambda node: node.server.fail_next(9, 200, verb="list", body="[]"), "api.slices"),
    "the machine": (lambda node: node.host("/sys/devices/system/cpu/online", "none"), "config.fits"),
}


@pytest.mark.parametrize("what", UNREADABLE)
async def test_unreadable_sources_are_reported(what: str, node: FaultyNode) -> None:
    """If a source is missing or damaged, only the checks that use it are unknown. These checks report a reason and a
    remedy.
    """
    spoil, name = UNREADABLE[what]
    spoil(node)
    found = await verdicts(node)
    (finding,) = found[name].findings
    assert (finding.level, bool(finding.why), bool(finding.remedy)) == (Level.UNKNOWN, True, True)
    assert found["host.own-files"].result == "good"
    assert not any("check itself failed" in one.why for verdict in found.values() for one in verdict.findings)
    lines = findings_text([*found.values()], "n").splitlines()
    assert lines.count(f"WHY      {finding.why}") == 1, "a source is named once, whatever hangs on it"


POLICIES = {
    "cpuManagerPolicy": {"none", "static"},
    "memoryManagerPolicy": {"None", "Static"},
    "topologyManagerPolicy": {"none", "best-effort", "restricted", "single-numa-node"},
}
"""Values that the kubelet accepts (pkg/kubelet/cm). With any other value or spelling, the kubelet does not start."""
PRINTED = [ROOT / "services", ROOT / "docs", ROOT / "charts", ROOT / "examples", ROOT / "README.md"]


def settings_in(text: str) -> list[tuple[str, str]]:
    """Returns the kubelet policies that a document sets."""
    return re.findall(r"\b(\w+ManagerPolicy): ([\w-]+)", text)


async def test_remedies_contain_values_that_the_kubelet_accepts(node: FaultyNode) -> None:
    """For each manager that is switched on, the remedy contains that manager's own value for switching it off."""
    node.kubelet_of |= {"cpuManagerPolicy": "static", "memoryManagerPolicy": "Static"}
    node.kubelet_of["topologyManagerPolicy"] = "restricted"
    node.status["kubeletPins"] = ["cpu", "memory", "a manager of a later release"]
    managers = ("cpu-manager", "memory-manager")
    found = await verdicts(node)
    remedies = [one.remedy for name in (*managers, "topology-manager") for one in found[f"kubelet.{name}"].findings]
    off = [("cpuManagerPolicy", "none"), ("memoryManagerPolicy", "None")]
    assert [settings_in(text) for text in remedies] == [[one] for one in (*off, ("topologyManagerPolicy", "none"))]
    assert all(len(one.evidence) == 1 for name in managers for one in found[f"kubelet.{name}"].findings)
    node.kubelet_of.clear()
    (node.kubelet_root / "config.yaml").unlink()
    found = await verdicts(node)
    unseen = [one for name in managers for one in found[f"kubelet.{name}"].findings]
    assert [settings_in(one.remedy) for one in unseen] == [[one] for one in off]
    assert all("or another NRI plugin" in one.what for one in unseen)


async def test_a_manager_that_is_off_is_not_blamed_for_pins(node: FaultyNode) -> None:
    """If the manager is off, pinned containers were pinned by another plugin or started before the manager was switched
    off.
    """
    node.status["kubeletPins"] = ["cpu"]
    found = await verdicts(node)
    (finding,) = found["kubelet.cpu-manager"].findings
    assert "although the kubelet's CPU manager policy is none" in finding.what
    assert "remove the other NRI plugin" in finding.remedy
    assert "claims take precedence" in finding.why
    assert found["kubelet.memory-manager"].result == "good"


def test_no_page_and_no_message_contains_an_invalid_policy() -> None:
    """The programs' messages, the pages, the chart and the examples are all searched."""
    files = [file for place in PRINTED for file in (place.rglob("*.*") if place.is_dir() else [place])]
    texts = [file.read_text(errors="replace") for file in files if file.suffix in (".py", ".md", ".yaml", ".txt")]
    found = {one for text in texts for one in settings_in(text)}
    assert {name for name, _ in found} == set(POLICIES)
    assert [(name, word) for name, word in found if word not in POLICIES[name]] == []


async def test_the_kubelet_is_queried_through_the_api_server_if_its_file_is_not_mounted(node: FaultyNode) -> None:
    """The response from the kubelet's configz endpoint takes flags into account. If the doctor is not permitted to read
    the endpoint, the checks are unknown and name an alternative.
    """
    node.kubelet_of = {}
    node.server.options.kubelets["node-a"] = {"cpuManagerPolicy": "static", "reservedSystemCPUs": "0"}
    found = await verdicts(node)
    assert found["kubelet.cpu-manager"].result == "problem"
    assert (found["kubelet.gates"].result, found["kubelet.reserved-cpus"].result) == ("good", "good")


@pytest.mark.parametrize("why", ["forbidden", "no kubelet answers"])
async def test_a_kubelet_that_cannot_be_queried_leaves_its_checks_unknown(why: str, node: FaultyNode) -> None:
    """The finding names the plugin and the chart value that would help. No other check is affected."""
    node.kubelet_of = {}
    if why == "forbidden":
        node.server.options.kubelets["node-a"] = {}
        node.server.options.forbidden.add(("get", "nodes/proxy"))
    found = await verdicts(node)
    (finding,) = found["kubelet.cpu-manager"].findings
    assert finding.level is Level.UNKNOWN
    assert "nodes/proxy" in finding.why if why == "forbidden" else "does not respond" in finding.why
    assert "kubectl numa doctor NODE" in finding.remedy
    assert "doctor.kubeletProxy: true" in finding.remedy
    assert found["api.reachable"].result == "good"


async def test_a_given_kubelet_configuration_replaces_the_detected_one(node: FaultyNode, tmp_path: Path) -> None:
    """The file may be a configz response or the kubelet's own file. Any other file is a usage error."""
    given = tmp_path / "kubelet"
    for text in ('{"kubeletconfig": {"cpuManagerPolicy": "static"}}', "cpuManagerPolicy: static\n"):
        given.write_text(text)
        async with node.up() as settings:
            facts = await gather(settings, str(given))
        assert isinstance(facts.kubelet, KubeletConfig)
        assert facts.kubelet.cpu_manager == "static"
    for text in ("[]", "reservedSystemCPUs: 9-1\n"):
        given.write_text(text)
        async with node.up() as settings:
            with pytest.raises(ConfigError):
                await gather(settings, str(given))


@pytest.mark.parametrize(("other", "result"), [("6", "good"), ("5", "problem")])
async def test_a_claims_shared_pool_cpus_are_not_a_fault(other: str, result: str, node: FaultyNode) -> None:
    """If a claim also requests CPUs in the shared pool, its container may run there, but not on other claims' CPUs."""
    shared = {"r": PoolCpus(cpus=frozenset({0, 1, 4, 5, 6, 7}), near=frozenset({4, 5}))}
    node.records[0] = node.records[0].model_copy(update={"pool_cpus": shared})
    node.records.append(node.claimed("other", other))
    node.containers[0]["cpus"] = "2-5"
    assert (await verdicts(node))["claims.pinned"].result == result


async def test_the_audit_is_not_the_remedy_for_a_container_with_only_offline_cpus(node: FaultyNode) -> None:
    """The audit does not move the container back until one of its CPUs is online, so the remedy refers to the check for
    offline CPUs.
    """
    parts = [one.model_copy(update={"cpus": frozenset({8, 9})}) for one in node.records[0].cpus]
    node.records[0] = node.records[0].model_copy(update={"cpus": tuple(parts)})
    node.containers[0]["cpus"] = "1-7"
    found = await verdicts(node)
    (finding,) = found["claims.pinned"].findings
    assert "unless all of its own CPUs are offline" in finding.why
    assert "claims.online" in finding.remedy
    assert "echo 1 >" in found["claims.online"].findings[0].remedy
    assert "claims.online" in remedy_of(Notice(code=StatusCode.CLAIM_NOT_ENFORCED, text="any"))


async def test_the_remedy_for_a_container_that_outlives_its_claim_is_to_stop_it(node: FaultyNode) -> None:
    """If the pod has been deleted, the remedy is to stop its container on the node. The finding says that the claims'
    CPUs stay allocated. It does not say that new claims get no CPUs, since other CPUs may be free.
    """
    node.containers[0] |= UNKNOWN_CLAIM
    (finding,) = (await verdicts(node))["claims.recorded"].findings
    assert "the claims' CPUs stay held" in finding.why
    assert (
        f"has been deleted, stop this container on the node (crictl stop {node.containers[0]['id']})" in finding.remedy
    )


async def test_a_record_in_another_format_is_skipped(node: FaultyNode) -> None:
    """The record's fields may have a different meaning, so the ``explain`` command skips it too. Other records are
    still checked.
    """
    node.records.append(node.claimed("new", "2-3").model_copy(update={"version": 9}))
    async with node.up() as settings:
        facts = await gather(settings)
    assert isinstance(facts.service, Service)
    assert [one.claim.name for one in facts.service.records] == ["work"]


@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: " ".join(filter(None, right)))
async def test_each_missing_permission_is_named(right: Right, node: FaultyNode) -> None:
    """The finding gives the rule that grants the missing permission, and the effect of not having it. No other check
    reports a wrong cause.
    """
    verb, group, resource, _ = right
    node.server.options.forbidden.add((verb, resource))
    found = await verdicts(node)
    (finding,) = found["api.rights"].findings
    assert finding.what.startswith(f"RBAC does not let the driver {verb} {resource}")
    assert f'apiGroups: ["{group}"], resources: [{resource}], verbs: [{verb}]' in finding.remedy
    unread = [one for verdict in found.values() for one in verdict.findings if one.level is Level.UNKNOWN]
    assert all(f"{verb} {resource}" in one.why for one in unread), "what could not be read names the same right"


@pytest.mark.parametrize(
    ("code", "setting", "level", "remedy"),
    [
        ("SysAdminMissing", "auto", "problem", "SYS_ADMIN capability"),
        ("KernelTooOld", "auto", "note", "boot Linux 6.7"),
        ("KernelTooOld", "partition", "problem", "boot Linux 6.7"),
        ("NodeIsContainer", "auto", "note", "a node that is not itself a container"),
        ("OfALaterRelease", "auto", "problem", "kubectl logs POD -c backend"),
        ("", "auto", "problem", "kubectl logs POD -c backend"),
    ],
)
async def test_the_reason_for_pool_enforcement_is_a_finding(
    code: str, setting: str, level: str, remedy: str, node: FaultyNode
) -> None:
    """The remedy fits the cause. A kernel that cannot create partitions is a fault only if partitions are required."""
    reason = "the reason in words"
    node.status |= {"exclusivity": "pool", "exclusivityReason": reason, "exclusivityCode": code}
    node.settings_of["cpuExclusivity"] = setting
    (finding,) = (await verdicts(node))["driver.exclusivity"].findings
    assert (finding.level.value, reason in finding.what, remedy in finding.remedy) == (level, True, True)


@pytest.mark.parametrize("mode", ["auto", "partition"])
@pytest.mark.parametrize("slices", [True, False])
async def test_host_daemons_on_claimed_cpus_are_a_finding_only_if_nothing_keeps_them_off(
    mode: str, slices: bool, node: FaultyNode
) -> None:
    """With hostSlices, no finding mentions host daemons and no remedy suggests hostSlices. Findings about refused
    claims do not mention host daemons either.
    """
    node.settings_of |= {"cpuExclusivity": mode, "hostSlices": slices}
    reason = "the kernel has no cpuset.cpus.exclusive; boot Linux 6.7 or later"
    node.status |= {"exclusivity": "pool", "exclusivityReason": reason, "exclusivityCode": "KernelTooOld"}
    node.containers[0].update(fallbackReason="x has CPU 2", exclusivity="pool")
    FAULTS["kernel.release/partitions"](node)
    FAULTS["host.daemons"](node)
    found = await verdicts(node)
    (exclusivity,), (kernel,), (pooled,) = (
        found[name].findings for name in ("driver.exclusivity", "kernel.release", "claims.kept-by-kernel")
    )
    refused = mode == "partition"
    assert ("are refused" in exclusivity.what, "shared pool" in exclusivity.what) == (refused, not refused)
    assert "set cpuExclusivity: auto" in exclusivity.remedy if refused else "boot Linux 6.7" in exclusivity.remedy
    for one in (exclusivity, kernel):
        assert ("host daemons stay" in one.why) == (not refused and not slices)
        assert ("hostSlices: true" in one.remedy) == (not refused and not slices)
    assert ("host daemons stay" in pooled.why) == (not slices)
    assert all(("set hostSlices: true" in one.remedy) == (not slices) for one in found["host.daemons"].findings)


def test_each_kind_of_mismatch_has_a_remedy() -> None:
    """This test fails if a new kind of mismatch between the machine and the configuration has no remedy."""
    assert _REMEDIES.keys() == set(MismatchKind)


async def test_pool_enforcement_is_healthy_if_the_configuration_selects_it(node: FaultyNode) -> None:
    """The backend reports that it uses the pool, but gives no reason for a fallback."""
    node.status |= {"exclusivity": "pool"}
    assert (await verdicts(node))["driver.exclusivity"].result == "good"


async def test_pages_on_demand_need_one_more_permission(node: FaultyNode) -> None:
    """The service watches claims only if the configuration allocates pages for them."""
    node.server.options.forbidden.add(("watch", "resourceclaims"))
    assert (await verdicts(node))["api.rights"].result == "good"
    node.settings_of["hugepagesOnDemand"] = [{"numaNode": 0, "size": "2Mi", "pages": 1}]
    (finding,) = (await verdicts(node))["api.rights"].findings
    assert "watch resourceclaims" in finding.what


async def test_permissions_are_not_checked_outside_the_pod(node: FaultyNode) -> None:
    """With a host root and without a kubeconfig, the permissions would be another pod's, so the result is unknown."""
    async with node.up() as settings:
        facts = await gather(replace(settings, config=settings.config.model_copy(update={"kubeconfig": ""})))
    api = {verdict.result for verdict in examine(facts) if verdict.check.group == "api"}
    assert api == {"unknown"}


def test_untrusted_strings_stay_on_one_line() -> None:
    """A string from a pod or a peer can neither forge a line nor send control sequences to the terminal."""
    check = Check("a.b", "Fine.", (), lambda: [problem("\x1b[2J.", "a\nb", "\u202e", ["\r"])])
    shown = findings_text([Verdict(check, tuple(check.run(None)))], "n").split("\n")
    assert shown[1:5] == [r"PROBLEM  \x1b[2J. [a.b]", r"EVIDENCE \r", r"WHY      a\nb", r"REMEDY   \u202e"]


async def test_an_error_in_one_check_hides_no_other_check() -> None:
    """A check that raises an exception is unknown, and its message reports the exception."""
    (finding,) = Check("a.b", "Fine.", (), lambda: 1 / 0).run(None)  # type: ignore[arg-type, return-value]
    assert finding.level is Level.UNKNOWN
    assert "ZeroDivisionError" in finding.why


def test_an_invalid_configuration_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 means invalid input, and a single line gives the cause."""
    (tmp_path / "config.yaml").write_text("reservedCPUs: 0.5\n")
    for command in ("doctor", "status"):
        assert cli.main([command, "--config", str(tmp_path / "config.yaml")]) == 2
        assert "reservedCPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("release", "remedy"),
    [
        ("6.1.0", "boot Linux 6.7 or later"),
        ("6.12.9", "this kernel release provides them: see kernel.delegated and kernel.kubepods"),
    ],
)
async def test_a_newer_kernel_is_not_suggested_for_a_recent_one(release: str, remedy: str, node: FaultyNode) -> None:
    """If a cgroup does not have the cpuset controller, its files are missing even on a new kernel."""
    node.host("/proc/sys/kernel/osrelease", f"{release}-amd64\n")
    FAULTS["kernel.release/partitions"](node)
    (finding,) = (await verdicts(node))["kernel.release"].findings
    assert finding.remedy == f"{remedy}, or set hostSlices: true"


async def test_several_facts_with_one_remedy_are_one_finding(node: FaultyNode) -> None:
    """Each fact is listed as evidence."""
    node.server.options.forbidden |= {("get", "nodes"), ("create", "events")}
    node.status |= {"requestTimeout": 0.5, "registrationTimeout": 1.0}
    node.cri = {"enable_cdi": False}
    node.nri["disable"] = True
    found = await verdicts(node)
    for name, number in (("runtime.timeouts", 2), ("runtime.settings", 3)):
        (finding,) = found[name].findings
        assert len(finding.evidence) == number
    (finding,) = found["api.rights"].findings
    assert 'apiGroups: [""], resources: [nodes]' in finding.remedy
    assert 'apiGroups: ["events.k8s.io"], resources: [events]' in finding.remedy


def test_long_evidence_is_truncated_only_in_the_text_output() -> None:
    """The JSON output contains all of the evidence."""
    facts = [f"fact {number}" for number in range(30)]
    check = Check("a.b", "Fine.", (), lambda: [problem("What.", "why", "remedy", facts)])
    found = [Verdict(check, tuple(check.run(None)))]
    assert "EVIDENCE and 10 more (-o json prints all)" in findings_text(found, "n")
    assert report(found, "n")["checks"][0]["findings"][0]["evidence"] == facts


def test_checks_left_unknown_by_the_same_source_are_summarized() -> None:
    """On a captured machine, nearly all checks are inconclusive."""
    unread = Unread("why", "remedy")
    verdicts_of = [Verdict(Check(f"a.b{number}", "Fine.", (), lambda: ()), (unknown(unread),)) for number in range(40)]
    assert "UNKNOWN  40 checks: a.b0, " in (shown := findings_text(verdicts_of, "n"))
    assert ", and 28 more\n" in shown
