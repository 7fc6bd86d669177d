# SPDX-License-Identifier: Apache-2.0
"""The commands' output for a cluster; "make plugin-check" also runs these tests with a real kubectl."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubectl_numa import cli

from hack.plugin import archive, main, zipapp
from tests.fakes.apiserver_store import CLAIMS, RESOURCES, SLICES
from tests.plugin.rig import REAL, TAKEN, TEMPLATES, Plugin, prepared, write_executable
from tests.rigs.builders import NODE, claim
from tests.rigs.decisions import INVENTORY
from tests.strategies.machines import GIB

_CLAIM = {
    **dict.fromkeys(("namespace", "node", "reason", "message"), "x"),
    **dict.fromkeys(("memory", "pods"), ()),
    **dict.fromkeys(("enforced", "reported"), True),
    "cpus": [1],
    "cpuCount": 1,
}
OFFERED = [device.amount for pool in INVENTORY.pools if pool.name == f"{NODE}-memory" for device in pool.devices]


async def test_nodes_shows_free_resources(plugin: Plugin) -> None:
    """CPUs, memory and hugepages are shown as "free of total", with the number of the node's claims."""
    [row] = await plugin.rows("nodes")
    assert (row["node"], row["numaNodes"], row["claims"], row["notEnforced"]) == (NODE, 2, 1, 0)
    total = sum(OFFERED)
    assert (row["cpus"], row["memoryBytes"]) == ({"free": 5, "total": 7}, {"free": total - GIB, "total": total})
    code, out, _ = await plugin.run("nodes")
    assert (code, out.splitlines()[0].split()[:4]) == (0, ["NODE", "NUMA", "NODES", "CPU"])
    assert "5 of 7" in out
    assert "1Gi of 1Gi" in out


async def test_nodes_shows_a_single_node(plugin: Plugin) -> None:
    """A node that publishes nothing is an error, as with ``kubectl get``."""
    assert [row["node"] for row in await plugin.rows("nodes", NODE)] == [NODE]
    code, out, err = await plugin.run("nodes", "node-z")
    assert (code, out, "node node-z publishes nothing" in err) == (1, "", True)


def observe(plugin: Plugin) -> None:
    """Marks each device as belonging to a node that only observes. Sets only the attribute, because an API server that
    does not support device taints would drop the taint.
    """
    for document in list(plugin.server.store.select(SLICES)):
        for device in document["spec"]["devices"]:
            device["attributes"][f"{document['spec']['driver']}/observe"] = {"bool": True}
        plugin.server.store.update(SLICES, "", document["metadata"]["name"], document)


async def test_nodes_shows_nodes_that_only_observe(plugin: Plugin) -> None:
    """The command recognizes such nodes by an attribute of their devices, because some API servers do not support
    device taints.
    """
    [row] = await plugin.rows("nodes")
    assert row["enforcement"] == "enforce"
    observe(plugin)
    [row] = await plugin.rows("nodes")
    assert row["enforcement"] == "observe"
    code, _, err = await plugin.run("free", NODE)
    assert (code, "the node only observes" in err) == (1, True)


async def test_free_and_explain_name_observe_mode_as_the_cause(plugin: Plugin) -> None:
    """Every node in the cluster only observes: it publishes devices, but a pending claim cannot use them."""
    wants = {"deviceClassName": "dra.cpu", "capacity": {"requests": {"dra.cpu/cpu": "1"}}}
    waiting = {"metadata": {"name": "one"}, "spec": {"devices": {"requests": [{"name": "cpus", "exactly": wants}]}}}
    plugin.server.store.create(CLAIMS, "ns", waiting)
    plugin.add_pod("p", spec={"resourceClaims": [{"name": "one", "resourceClaimName": "one"}]})
    observe(plugin)
    code, out, err = await plugin.run("free")
    assert (code, out) == (0, "")
    assert err.startswith("No nodes have devices usable by claims: all are tainted, or the nodes only observe;")
    _, out, _ = await plugin.run("explain", "p", "-n", "ns")
    assert "all of its devices are tainted, or their nodes only observe; see kubectl numa nodes" in out


async def test_explain_distinguishes_missing_devices_from_an_unknown_class(plugin: Plugin) -> None:
    """If no node publishes devices of the driver's class, the command reports that as the cause. An unknown class may
    select any devices, so the command reports that it cannot determine the free amount.
    """
    for one in list(plugin.server.store.select(SLICES)):
        plugin.server.store.delete(SLICES, "", one["metadata"]["name"])
    wants = [{"name": name, "exactly": {"deviceClassName": name}} for name in ("dra.cpu", "special")]
    plugin.server.store.create(CLAIMS, "ns", {"metadata": {"name": "one"}, "spec": {"devices": {"requests": wants}}})
    plugin.add_pod("p", spec={"resourceClaims": [{"name": "one", "resourceClaimName": "one"}]})
    _, out, _ = await plugin.run("explain", "p", "-n", "ns")
    assert "dra.cpu: class dra.cpu; no node publishes such devices; see kubectl numa nodes" in out
    assert "special: class special; the free amount cannot be determined from the ResourceSlices" in out


@pytest.mark.parametrize("tokens", [["a"] * 9, ["a", "b"] * 5])
async def test_a_list_whose_pages_repeat_is_an_error(plugin: Plugin, tokens: list[str]) -> None:
    """A server or a proxy that always announces one more page must not keep the command running forever."""
    for token in tokens:
        page = {"kind": "ResourceSliceList", "metadata": {"continue": token}, "items": []}
        plugin.server.fail_next(1, 200, body=json.dumps(page))
    code, out, err = await plugin.run("nodes")
    assert (code, out) == (1, "")
    assert "repeats the same page; is this an API server?" in err
    lists = [one for one in plugin.server.served if one.resource == "resourceslices"]
    assert len(lists) == len(set(tokens)) + 1


async def test_free_shows_resources_by_numa_node(plugin: Plugin) -> None:
    """A claim reduces the free amounts of its own NUMA node only; a node that publishes nothing is an error."""
    rows = await plugin.rows("free", NODE)
    told = [(row["numaNode"], row["cpus"], row["memoryBytes"]) for row in rows]
    assert told == [(0, 1, OFFERED[0] - GIB), (1, 4, OFFERED[1])]
    ordered = [row["numaNode"] for row in await plugin.rows("free", "--sort-by", "cpus")]
    assert ordered == [1, 0], "the node with the most free CPUs comes first"
    code, _, err = await plugin.run("free", "node-z")
    assert (code, "node node-z publishes nothing" in err) == (1, True)


async def test_claims_shows_cpus_and_enforcement(plugin: Plugin) -> None:
    """The values come from the claim's own status, which the node has written; the wide format adds the reason."""
    memory = [{"device": "memory-numa000", "kind": "memory", "bytes": GIB}]
    told = {"claim": "train", "node": NODE, "cpuCount": 2, "cpus": [1, 5], "memory": memory, "enforced": True}
    [row] = await plugin.rows("claims", "-n", "ns")
    assert {name: row[name] for name in told} == told
    code, out, _ = await plugin.run("claims", "-n", "ns")
    assert code == 0
    assert re.search(r"^train +node-a +1,5 +1Gi memory +name-pod-1 +yes$", out, re.MULTILINE), out
    assert "REASON" not in out
    assert "Exclusive" in (await plugin.run("claims", "-n", "ns", "-o", "wide"))[1]


async def test_claims_of_the_contexts_namespace_are_listed(plugin: Plugin) -> None:
    """The namespace comes from the context or from ``-n``. ``-A`` lists the claims in all namespaces, and takes
    precedence over ``-n``, as in kubectl.
    """
    code, out, err = await plugin.run("claims")
    assert (code, out) == (0, "")
    assert err == "No claims with CPUs or memory found in default namespace; -A lists all namespaces.\n"
    spy, log = plugin.path / "spy", plugin.path / "log"
    write_executable(spy, f'#!/bin/sh\necho "$@" >>{log}\nexec {REAL or plugin.path / "kubectl"} "$@"\n')
    await plugin.run("claims", KUBECTL=str(spy))
    asked = re.findall(r"/v1(\S*)/resourceclaims", log.read_text())
    assert asked == ["/namespaces/default"], "no permission in other namespaces is required"
    for flags in (["-A"], ["--all-namespaces"], ["-A", "-n", "other"], ["-n", "ns"]):
        assert [one["claim"] for one in await plugin.rows("claims", *flags)] == ["train"]
    file = plugin.path / "kubeconfig"
    document = json.loads(file.read_text())
    document["contexts"][0]["context"]["namespace"] = "ns"
    file.write_text(json.dumps(document))
    assert [one["claim"] for one in await plugin.rows("claims")] == ["train"]
    assert await plugin.rows("claims", "-n", "default") == []


async def test_the_namespace_is_a_column_only_with_all_namespaces(plugin: Plugin) -> None:
    """JSON contains the namespace in either case, as with kubectl."""
    one, every = [(await plugin.run("claims", *flags))[1].split() for flags in (["-n", "ns"], ["-A"])]
    assert (one[:2], every[:3]) == (["CLAIM", "NODE"], ["NAMESPACE", "CLAIM", "NODE"])
    assert [row["namespace"] for row in await plugin.rows("claims", "-n", "ns")] == ["ns"]


async def test_lists_are_limited_by_labels(plugin: Plugin) -> None:
    """``claims`` filters by the labels of the claims, ``nodes`` and ``free`` by the labels of the Node objects."""
    document = prepared(INVENTORY.machine)
    document["metadata"] |= {"name": "labelled", "labels": {"app": "db"}}
    plugin.server.store.create(CLAIMS, "ns", document)
    assert [row["claim"] for row in await plugin.rows("claims", "-n", "ns", "-l", "app=db")] == ["labelled"]
    nodes = next(one for one in RESOURCES if one.name == "nodes")
    plugin.server.store.create(nodes, "", {"metadata": {"name": NODE, "labels": {"pool": "hpc"}}})
    for words in (["nodes"], ["free"]):
        assert {row["node"] for row in await plugin.rows(*words, "-l", "pool=hpc")} == {NODE}
    for words in (["nodes"], ["nodes", NODE], ["free"], ["free", NODE]):
        code, out, err = await plugin.run(*words, "--selector", "pool=web")
        assert (code, out) == (0, "")
        assert err == "No nodes found that publish CPUs or memory with labels pool=web.\n"
    observe(plugin)
    _, _, err = await plugin.run("free", "-l", "pool=hpc")
    assert err.endswith("all are tainted, or the nodes only observe; see kubectl numa nodes -l pool=hpc.\n")


async def test_flags_may_precede_the_command(plugin: Plugin) -> None:
    """Flags before the command work as in ``kubectl -n ns get``; a flag after the command takes precedence."""
    for words in (["-n", "ns", "claims"], ["-n", "other", "claims", "-n", "ns"]):
        assert [row["claim"] for row in await plugin.rows(*words)] == ["train"]
    for arguments in (["--context", "c", "nodes"], ["--context", "other", "nodes", "--context", "c"]):
        assert cli.build_parser().parse_args(arguments).context == "c"


async def test_lists_have_the_output_formats_of_kubectl(plugin: Plugin) -> None:
    """YAML has the same content as JSON, kubectl accepts the printed names, and headings can be switched off."""
    for words in (["nodes"], ["free"], ["claims", "-A"]):
        rows = await plugin.rows(*words)
        assert rows
        code, out, _ = await plugin.run(*words, "-o", "yaml")
        assert (code, yaml.safe_load(out)) == (0, rows)
        with_headings, without = [(await plugin.run(*words, *more))[1] for more in ([], ["--no-headers"])]
        assert without.split() == with_headings.partition("\n")[2].split()
    assert (await plugin.run("nodes", "-o", "name"))[1] == f"node/{NODE}\n"
    assert (await plugin.run("claims", "-A", "-o", "name"))[1] == "resourceclaim.resource.k8s.io/train\n"
    narrow, wide = [(await plugin.run("nodes", *more))[1].partition("\n")[0] for more in ([], ["-o", "wide"])]
    assert wide.split() == [*narrow.split(), "DEVICES", "TAINTED", "DEVICES"]


async def test_claims_are_watched(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new or changed claim gets a row below the first table, without headings."""
    lists = [[{"claim": name, **_CLAIM} for name in names] for names in (["a"], ["a"], ["a", "b"])]
    answers, printed, waits = iter(lists), io.StringIO(), list[float]()

    def found(_: object) -> list[dict[str, Any]]:
        if (answer := next(answers, None)) is None:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(cli, "claim_documents", found)
    monkeypatch.setattr(cli.Request, "cluster", lambda *_: None)
    monkeypatch.setattr("kubectl_numa.cli.time.sleep", waits.append)
    with contextlib.redirect_stdout(printed), pytest.raises(KeyboardInterrupt):
        cli.run(["claims", "-A", "--watch"], "kubectl")
    assert [line.split()[1] for line in printed.getvalue().splitlines()] == ["CLAIM", "a", "b"]
    assert waits == [5.0] * 3
    code, out, err = await plugin.run("claims", "--watch", "-o", "json")
    assert (code, out, err.count("\n")) == (2, "", 1)


async def test_a_watch_compares_each_claim_with_its_own_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may have thousands of claims, and comparing all of them with each other would take seconds."""
    compared = 0

    class Counted(dict[str, Any]):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        def __ne__(self, other: object) -> bool:
            return not self == other

        __hash__ = None

    answers = iter([[Counted(claim=f"c{number}", **_CLAIM) for number in range(200)] for _ in range(2)])

    def found(_: object) -> list[Counted]:
        if (answer := next(answers, None)) is None:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(cli, "claim_documents", found)
    monkeypatch.setattr(cli.Request, "cluster", lambda *_: None)
    monkeypatch.setattr("kubectl_numa.cli.time.sleep", lambda _: None)
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(KeyboardInterrupt):
        cli.run(["claims", "-A", "--watch"], "kubectl")
    assert compared <= 2 * 200


@pytest.mark.parametrize("words", [[], *([name] for name in cli.COMMANDS)])
async def test_every_help_text_has_working_examples(plugin: Plugin, words: list[str]) -> None:
    """Each help text also lists the exit statuses."""
    code, out, _ = await plugin.run(*words, "--help")
    assert (code, "Exit status: " in out) == (0, True)
    examples = re.findall(r"^  kubectl numa (.*?)(?: \|.*)?$", out.partition("examples:\n")[2], re.MULTILINE)
    assert examples
    for example in examples:
        cli.build_parser().parse_args(shlex.split(example))


@pytest.mark.parametrize(
    "words", [["nodes", "-o", "xml"], ["bogus"], [], ["explain"], ["free", "-A"], ["page", "n", "--port", "x"]]
)
async def test_a_usage_error_is_one_line(plugin: Plugin, words: list[str]) -> None:
    """The error refers to the help, and the exit status is 2."""
    code, out, err = await plugin.run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kubectl numa: ")
    assert err.endswith("--help\n")


async def test_a_pod_is_explained(plugin: Plugin) -> None:
    """The output contains the resources of the pod's claims; for a pending claim, it contains the request and the
    device with the most free resources.
    """
    wants = {"deviceClassName": "dra.cpu", "capacity": {"requests": {"dra.cpu/cpu": "6"}}}
    waiting = {"metadata": {"name": "big"}, "spec": {"devices": {"requests": [{"name": "cpus", "exactly": wants}]}}}
    plugin.server.store.create(CLAIMS, "ns", waiting)
    named = [{"name": name, "resourceClaimName": name} for name in ("train", "big", "missing")]
    plugin.add_pod("p", spec={"resourceClaims": named})
    plugin.add_pod("plain")
    code, out, _ = await plugin.run("explain", "p", "-n", "ns")
    assert code == 0
    assert "cpus: 2 of cpudevnuma000 on node-a: CPUs 1,5, exclusive" in out
    assert "enforced: yes: the kernel keeps all other processes off" in out
    largest = "the largest free amount is 4 of cpudevnuma001 on node-a"
    assert f"cpus: requests 6; 0 of 2 devices have that much free; {largest}" in out
    assert "claim missing\n  does not exist: create ResourceClaim missing in namespace ns" in out
    assert "has no claims" in (await plugin.run("explain", "plain", "-n", "ns"))[1]
    code, _, err = await plugin.run("explain", "nobody", "-n", "ns")
    assert (code, 'pods "nobody" not found' in err) == (1, True)


async def test_a_request_for_several_devices_is_explained(plugin: Plugin) -> None:
    """The number of devices is part of the request, as with ``cpuDeviceMode: individual``."""
    for amount, each in (({}, "1"), ({"capacity": {"requests": {"dra.cpu/cpu": "3"}}}, "3")):
        wants = {"deviceClassName": "dra.cpu", "count": 4, **amount}
        spec = {"devices": {"requests": [{"name": "cpus", "exactly": wants}]}}
        plugin.server.store.create(CLAIMS, "ns", {"metadata": {"name": f"c{each}"}, "spec": spec})
        plugin.add_pod(f"p{each}", spec={"resourceClaims": [{"name": "c", "resourceClaimName": f"c{each}"}]})
        _, out, _ = await plugin.run("explain", f"p{each}", "-n", "ns")
        assert f"  cpus: requests 4 devices with {each} each; " in out


async def test_a_container_that_is_not_restarted_is_explained(plugin: Plugin) -> None:
    """A failed container of a Job's pod has only the state ``terminated``. Containers that succeeded are left out."""
    killed = {"name": "main", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
    done = {"name": "first", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    spec = {"resourceClaims": [{"name": "c", "resourceClaimName": "train"}]}
    plugin.add_pod("p", spec=spec, status={"initContainerStatuses": [done], "containerStatuses": [killed]})
    _, out, _ = await plugin.run("explain", "p", "-n", "ns")
    assert "container main is not running: OOMKilled\n" in out
    assert "container first" not in out


async def test_the_second_pod_of_a_claim_is_not_reported_as_enforced(plugin: Plugin) -> None:
    """The claim's own status belongs to the pod that uses it; for the other pod the kubelet reports the rejection."""
    text = "dra.cpu claim ns/train (u) belongs to container main of pod ns/first, and pods cannot share it"
    failed = {"reason": "CreateContainerError", "message": f"failed to create: NRI: rpc error: dra-driver-numa: {text}"}
    refused = {"containerStatuses": [{"name": "main", "state": {"waiting": failed}}]}
    again = {"reason": "CrashLoopBackOff", "message": "back-off"}
    killed = {"reason": "StartError", "message": f"NRI: dra-driver-numa: {text}"}
    started = {
        "containerStatuses": [{"name": "main", "state": {"waiting": again}, "lastState": {"terminated": killed}}]
    }
    spec = {"resourceClaims": [{"name": "c", "resourceClaimName": "train"}]}
    for name, status, reason in (("second", refused, "CreateContainerError"), ("third", started, "StartError")):
        plugin.add_pod(name, spec=spec, status=status)
        code, out, _ = await plugin.run("explain", name, "-n", "ns")
        assert (code, "enforced: yes" in out) == (0, False)
        assert f"container main was refused: {reason}: dra-driver-numa: {text}\n" in out
        assert "enforced: not for this pod (refused containers: main; see above)" in out
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    plugin.add_pod("pulling", spec=spec, status={"containerStatuses": [{"name": "main", "state": pulling}]})
    out = (await plugin.run("explain", "pulling", "-n", "ns"))[1]
    assert "container main is not running: ImagePullBackOff: no such image" in out
    assert "enforced: yes" in out


async def test_a_claim_that_the_pool_enforces_is_shown_with_the_reason(plugin: Plugin) -> None:
    """The reason comes from the claim's status, into which the node has written it."""
    document = prepared(INVENTORY.machine, "pool", "nri-backend lacks the capability SYS_ADMIN")
    document["metadata"]["name"] = "pooled"
    plugin.server.store.create(CLAIMS, "ns", document)
    text = "the shared pool excludes these CPUs: nri-backend lacks the capability SYS_ADMIN"
    [row] = [row for row in await plugin.rows("claims", "-A") if row["claim"] == "pooled"]
    assert (row["enforced"], row["message"]) == (True, text)
    plugin.add_pod("p", spec={"resourceClaims": [{"name": "c", "resourceClaimName": "pooled"}]})
    assert f"enforced: yes: {text}\n" in (await plugin.run("explain", "p", "-n", "ns"))[1]


async def test_explain_shows_that_a_claim_also_uses_the_shared_pool(plugin: Plugin) -> None:
    """The claim's status contains ``poolCPUs`` in addition to the isolation of its own CPUs."""
    document = prepared(INVENTORY.machine, "pool")
    document["metadata"]["name"] = "vpp"
    next(one["data"] for one in document["status"]["devices"] if "cpus" in one["data"])["poolCPUs"] = "numa"
    plugin.server.store.create(CLAIMS, "ns", document)
    plugin.add_pod("p", spec={"resourceClaims": [{"name": "c", "resourceClaimName": "vpp"}]})
    assert ": CPUs 1,5, exclusive, poolCPUs: numa\n" in (await plugin.run("explain", "p", "-n", "ns"))[1]


async def test_a_pod_that_does_not_fit_is_explained_by_the_scheduler(plugin: Plugin) -> None:
    """A claim may also be pending because its pod does not fit: memory requests and taints appear only in the pod's
    condition.
    """
    wants = {"deviceClassName": "dra.cpu", "capacity": {"requests": {"dra.cpu/cpu": "1"}}}
    waiting = {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [{"name": "cpus", "exactly": wants}]}}}
    plugin.server.store.create(CLAIMS, "ns", waiting)
    why = "0/1 nodes are available: 1 Insufficient memory."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
    spec = {"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]}
    plugin.add_pod("p", spec=spec, status={"conditions": [condition]})
    out = (await plugin.run("explain", "p", "-n", "ns"))[1]
    assert f"pod ns/p has no node yet; the scheduler's reason: {why}\n" in out
    assert "waiting for the scheduler to find a node that suits both the claim and the pod" in out


async def test_a_missing_claim_is_distinguished_from_one_that_will_be_created(plugin: Plugin) -> None:
    """A claim given by name must exist; one from a template will be created if the template exists."""
    entries = [{"name": name, "resourceClaimTemplateName": name} for name in ("there", "typo")]
    plugin.server.store.create(TEMPLATES, "ns", {"metadata": {"name": "there"}, "spec": {}})
    plugin.add_pod("p", spec={"resourceClaims": entries})
    out = (await plugin.run("explain", "p", "-n", "ns"))[1]
    assert "claim there\n  has not been created yet; kube-controller-manager creates it from template there" in out
    assert "claim typo\n  cannot be created: there is no ResourceClaimTemplate typo in namespace ns" in out
    made = [{"name": "there", "resourceClaimName": "p-there-abc"}]
    plugin.add_pod("old", spec={"resourceClaims": entries[:1]}, status={"resourceClaimStatuses": made})
    out = (await plugin.run("explain", "old", "-n", "ns"))[1]
    assert "claim p-there-abc\n  no longer exists; it was created from template there" in out


async def test_strings_in_claims_cannot_control_the_terminal(plugin: Plugin) -> None:
    """Escape sequences in strings from the API are shown and not executed."""
    document = prepared(INVENTORY.machine)
    document["metadata"]["name"] = "odd"
    condition = document["status"]["devices"][0]["conditions"][1]
    condition |= {"status": "False", "message": "\x1b]0;owned\x07\x1b[2J\u202e"}
    plugin.server.store.create(CLAIMS, "ns", document)
    for form in ("wide", "json", "yaml"):
        code, out, _ = await plugin.run("claims", "-A", "-o", form)
        assert code == 0
        assert "\\u001b" in out or "\\x1b" in out
        assert all(one.isprintable() or one == "\n" for one in out)


async def test_lists_are_read_page_by_page(plugin: Plugin) -> None:
    """A cluster with more claims than one response contains is read completely."""
    for number in range(501):
        document = claim(f"u{number}", TAKEN, name=f"more-{number}")
        plugin.server.store.create(CLAIMS, "ns", document)
    assert len(await plugin.rows("claims", "-A")) == 502


async def test_errors_of_kubectl_are_passed_on(plugin: Plugin) -> None:
    """A missing permission and a missing kubectl are each reported in one line."""
    plugin.server.options.forbidden.add(("list", "resourceslices"))
    code, _, err = await plugin.run("nodes")
    assert (code, "forbidden" in err) == (1, True)
    code, _, err = await plugin.run("nodes", KUBECTL="/nonexistent/kubectl")
    assert (code, err) == (
        1,
        "kubectl numa: /nonexistent/kubectl: No such file or directory; set KUBECTL to the path of kubectl\n",
    )


def test_builds_are_reproducible(tmp_path: Path) -> None:
    """The program and the archive do not depend on when and where they are built; the manifest contains the archive's
    digest.
    """
    assert archive(zipapp()) == archive(zipapp())
    assert main([str(tmp_path), "https://forge.example/numa/"]) == 0
    manifest = (tmp_path / "numa.yaml").read_text()
    assert "uri: https://forge.example/numa/releases/download/v" in manifest
