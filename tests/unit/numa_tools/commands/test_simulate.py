# SPDX-License-Identifier: Apache-2.0
"""Simulation of ordinary manifests on a captured machine: the simulated scheduler allocates them, and the real
allocator prepares them.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.devices.inventory import build_inventory
from numa_contract.config import Config
from numa_contract.cpuset import parse_cpu_list
from numa_node.config_file import PortableDumper
from numa_tools import cli
from numa_tools.scheduling.simulation import Simulation

from tests.rigs.builders import NODE, cpu_record, files_of, write_claim
from tests.rigs.trees import captured, far_memory, small_machine, write_tree
from tests.strategies.machines import machine

EXAMPLES = Path(__file__).parents[4] / "examples"
FITTING = "32intel64-2p8co2t+8ve"
"""Two NUMA nodes, each with 8 cores and two threads per core."""
# For each example, the configuration that it needs in addition to the machine, according to its README.
CONFIGS: dict[str, dict[str, Any]] = {
    "slurm-bridge": {"cpuDeviceMode": "individual"},
    "named-cpus": {"allocator": "external"},
    "extended-resource": {"cpuDeviceMode": "individual"},
}


def foreign(driver: str, attribute: str) -> list[dict[str, Any]]:
    """Returns another driver's class and slice, with one device on NUMA node 1."""
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    pool = {"name": "n", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "pool": pool, "devices": [{"name": "one", "attributes": {attribute: {"int": 1}}}]}
    return [
        {"kind": "DeviceClass", "metadata": {"name": driver}, "spec": {"selectors": [selector]}},
        {"kind": "ResourceSlice", "metadata": {"name": driver}, "spec": spec},
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a host root with two NUMA nodes, each with 16 CPUs, 2 MiB pages and 1 GiB pages."""
    tree = captured(FITTING)
    nodes = "/sys/devices/system/node/node{}/hugepages/hugepages-{}kB/{}"
    pages = {
        nodes.format(node, size, file): str(count)
        for node in (0, 1)
        for size, count in ((2048, 2048), (1 << 20, 8))
        for file in ("nr_hugepages", "free_hugepages")
    }
    return write_tree(tree.changed(pages), tmp_path_factory.mktemp("host"))


def written(path: Path, *documents: Any) -> str:
    """Writes a file with the given documents and returns its path."""
    path.write_text(yaml.dump_all(documents, Dumper=PortableDumper))
    return str(path)


def claim(name: str, *requests: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Returns a ResourceClaim."""
    devices = {"requests": list(requests), **spec}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": devices},
    }


def request(name: str, of: str = "dra.cpu", amount: Any = None, **more: Any) -> dict[str, Any]:
    """Returns a request for one device."""
    key = "dra.cpu/cpu" if of == "dra.cpu" else "size"
    capacity = {} if amount is None else {"capacity": {"requests": {key: amount}}}
    return {"name": name, "exactly": {"deviceClassName": of, **capacity, **more}}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """Returns the exit status, the printed JSON, and standard error."""
    status = cli.main(["simulate", "-o", "json", *arguments])
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if printed.out else None, printed.err


def reasons(outcome: Any) -> str:
    """Returns the reasons why claims do not fit."""
    return "\n".join(text for row in outcome["outcomes"] for text in row.get("reasons", ()))


@pytest.mark.parametrize(
    "path", [*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("existing-pods/*.yaml")], ids=lambda path: path.stem
)
def test_every_example_fits(path: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine has the devices that the example needs, and the other drivers' classes and slices exist."""
    config = written(tmp_path / "config.yaml", CONFIGS.get(path.stem, {}))
    single = {"metadata": {"name": "dra.cpu"}, "kind": "DeviceClass"}
    single["spec"] = {
        "extendedResourceName": "dra-numa/cpu",
        "selectors": [{"cel": {"expression": 'device.driver == "dra.cpu"'}}],
    }
    others = [
        *foreign("dra.net", "dra.net/numaNode"),
        *foreign("gpu.nvidia.com", "resource.kubernetes.io/numaNode"),
        single,
    ]
    beside = ["--claim", written(tmp_path / "others.yaml", *others)]
    kind = "--claim" if path.stem == "kubevirt" else "--pod"
    status, outcome, err = run(capsys, "--host-root", str(root), "--config", config, kind, str(path), *beside)
    assert (status, err) == (0, "")
    (row,) = outcome["outcomes"]
    if path.stem == "claimed-by-policy":
        assert row["claims"] == []  # in the cluster, the MutatingAdmissionPolicy adds the claim
    else:
        assert [one for each in row["claims"] for one in each["devices"]]
    if path.stem.endswith("same-node"):
        assert {one["device"] for one in row["claims"][0]["devices"]} == {"cpudevnuma001", "memory-numa001", "one"}


def test_replicas_are_simulated_one_after_another(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Devices fill up in order. Each replica that does not fit has its own reason, and the exit status is 3."""
    example = str(EXAMPLES / "one-numa-node.yaml")
    status, outcome, _ = run(capsys, "--host-root", str(root), "--pod", example, "-n", "9")
    assert (status, outcome["fit"], outcome["of"]) == (3, 7, 9)
    assert [row["claims"][0]["devices"][0]["device"] for row in outcome["outcomes"][:7]] == ["cpudevnuma000"] * 4 + [
        "cpudevnuma001"
    ] * 3
    assert reasons(outcome).count("cpudevnuma001 3 of 15 dra.cpu/cpu free, 4 requested") == 2
    assert "does not fit (scheduling): request cpus: " in _table(capsys, root, example)


def test_a_node_in_observe_mode_is_reported_as_one_that_refuses_claims(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The outcomes are those of a node that enforces claims. The last line of the output says that a node in observe
    mode refuses every claim.
    """
    arguments = ["--host-root", str(root), "--pod", str(EXAMPLES / "one-numa-node.yaml")]
    observing = [*arguments, "--config", written(tmp_path / "config.yaml", {"enforcement": "observe"})]
    outcomes = [run(capsys, *one)[1] for one in (arguments, observing)]
    assert [one.pop("enforcement") for one in outcomes] == ["enforce", "observe"]
    assert outcomes[0] == outcomes[1]
    printed = []
    for one in (arguments, observing):
        assert cli.main(["simulate", *one]) == 0
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[1][:-1] == printed[0]
    assert printed[1][-1].startswith("this node only observes: it refuses every claim until driverConfig sets ")


def _table(capsys: pytest.CaptureFixture[str], root: Path, example: str) -> str:
    assert cli.main(["simulate", "--host-root", str(root), "--pod", example, "-n", "9"]) == 3
    return capsys.readouterr().out


MANIFESTS = Path(__file__).parents[3] / "data" / "manifests"


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_workload_manifests_fit(path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each template is simulated as a single pod, and a note gives the number of pods that would be created from the
    template.
    """
    both = ["--pod", str(path), "--pod", str(MANIFESTS / "claims.yaml")]
    if path.stem == "claims":
        return
    status, outcome, err = run(capsys, "--host-root", str(root), *both)
    assert (status, err) == (0, "")
    assert [one["devices"][0]["request"] for row in outcome["outcomes"] for one in row["claims"]][:1] == ["cpus"]
    notes = [note for row in outcome["outcomes"] for note in row.get("notes", ())]
    if path.stem == "mpijob":
        assert notes == ["only one of its template's 2 pods is simulated; -n N simulates N on this node"]
        status, outcome, _ = run(capsys, "--host-root", str(root), *both, "-n", "9")
        assert (status, outcome["fit"], outcome["of"]) == (3, 16, 18)


ODD = "device.odd() == 1"


@pytest.mark.parametrize(
    ("expressions", "status"),
    [
        (['device.driver == "dra.cpu"'], 0),
        (["device.attributes['resource.kubernetes.io'].numaNode.includes(0)"], 0),
        (["device.driver.lowerAscii().matches('^dra[.]cpu$')"], 0),
        (["device.attributes['dra.cpu'].?tier.orValue('local') == 'local'"], 0),
        (["[0, 1].exists(n, n == device.attributes['resource.kubernetes.io'].numaNode)"], 0),
        (["string(device.attributes['dra.cpu'].numaNodeID) == '0'"], 0),
        (["device.capacity['dra.cpu'].cpu.asInteger() > 1"], 0),
        (["device.attributes['dra.cpu'].numaNodeID == 5"], 3),
        (["device.attributes['dra.cpu'].nothing == 5"], 3),
        ([ODD], 4),
        ([f"{ODD} || device.attributes['dra.cpu'].numaNodeID == 1"], 4),
        ([f"{ODD} || device.attributes['dra.cpu'].numaNodeID == 0"], 0),
        ([ODD, "device.attributes['dra.cpu'].numaNodeID == 5"], 3),
        (["device.driver =="], 4),
    ],
)
def test_a_selector_that_cannot_be_evaluated_has_its_own_exit_status(
    expressions: list[str], status: int, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the outcome does not depend on the selector's value, the exit status is the same as for any other selector."""
    selectors = [{"cel": {"expression": one}} for one in expressions]
    file = written(tmp_path / "c.yaml", claim("c", request("a", amount=2, selectors=selectors)))
    found, outcome, _ = run(capsys, "--host-root", str(root), "--claim", file)
    (row,) = outcome["outcomes"]
    assert (found, row["fits"]) == (status, {0: True, 3: False, 4: None}[status])
    assert (outcome["fit"], outcome["unknown"]) == (int(status == 0), int(status == 4))
    assert ("reasons" in row, "unknown" in row) == (status == 3, status == 4)


def test_an_unknown_outcome_names_the_selector(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message quotes the expression and the part that the simulation does not support. The summary gives the number
    of unknown outcomes.
    """
    odd = claim("odd", request("a", amount=2, selectors=[{"cel": {"expression": ODD}}]))
    later, large = claim("later", request("a", amount=2)), claim("large", request("a", amount=99))
    file = written(tmp_path / "c.yaml", odd, later)
    why, disputed = (
        "the function odd() is not supported",
        "may be allocated to an earlier claim whose outcome is unknown",
    )
    assert cli.main(["simulate", "--host-root", str(root), "--claim", file]) == 4
    assert capsys.readouterr().out.splitlines() == [
        f"odd: unknown (scheduling): request a: selectors[0]: cannot be evaluated: {why}: 'device.odd() == 1'",
        f"later: unknown (scheduling): device cpudevnuma000 {disputed}",
        "0 of 2 fit, 2 unknown; the shared pool has CPUs 0-31",
    ]
    file = written(tmp_path / "c.yaml", odd, large)
    assert cli.main(["simulate", "--host-root", str(root), "--claim", file]) == 3
    assert "0 of 2 fit, 1 unknown" in capsys.readouterr().out


def test_manifests_are_read_from_standard_input(root: Path) -> None:
    """``-`` means standard input, so rendered manifests can be piped into the command."""
    command = [sys.executable, "-m", "numa_tools", "simulate", "-o", "json", "--host-root", str(root), "--pod", "-"]
    data = (EXAMPLES / "cpus.yaml").read_bytes()
    ran = subprocess.run(command, input=data, capture_output=True, check=True, timeout=30)
    assert json.loads(ran.stdout)["outcomes"][0]["claims"][0]["devices"][0]["cpus"] == "0-1,16-17"


def test_a_claim_that_is_allocated_but_refused_by_the_driver_does_not_fit(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The outcome names the step that fails. Nothing is allocated partially, so later claims still fit."""
    whole = {"apiVersion": "v1alpha1", "cpuConfig": {"fullPhysicalCores": True}}
    odd = claim("odd", request("a", amount=3), config=[{"opaque": {"driver": "dra.cpu", "parameters": whole}}])
    file = written(tmp_path / "c.yaml", odd, claim("even", request("a", amount="4")))
    status, outcome, _ = run(capsys, "--host-root", str(root), "--claim", file)
    first, second = outcome["outcomes"]
    assert (status, first["stage"], second["fits"]) == (3, "preparing", True)
    assert "are not a whole number of physical cores; the next possible amount is 4" in reasons(outcome)
    assert second["claims"][0]["devices"][0]["cpus"] == "0-1,16-17"


def test_claims_on_this_node_are_taken_into_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prepared claims occupy their resources, unless an empty machine is simulated."""
    host = write_tree(small_machine(), tmp_path / "host")
    directory = host / "var/run/cdi"
    directory.mkdir(parents=True)
    held = cpu_record("11111111-2222-3333-4444-555555555555", "r=0-2")
    results = [
        part.model_copy(update={"device": "cpudevnuma000", "consumed": {"dra.cpu/cpu": "3"}}) for part in held.results
    ]
    write_claim(directory, held.model_copy(update={"results": tuple(results)}))
    file = written(tmp_path / "c.yaml", claim("c", request("a", amount="2")))
    (row,) = run(capsys, "--host-root", str(host), "--claim", file)[1]["outcomes"]
    assert row["claims"][0]["devices"][0]["device"] == "cpudevnuma001"
    (row,) = run(capsys, "--host-root", str(host), "--claim", file, "--empty")[1]["outcomes"]
    assert row["claims"][0]["devices"][0]["device"] == "cpudevnuma000"


def test_another_drivers_class_must_be_given(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is assumed about a class that is not part of the input. The message says how to add the class."""
    status, outcome, _ = run(capsys, "--host-root", str(root), "--pod", str(EXAMPLES / "gpu-same-node.yaml"))
    remedy = "add it to the files, with its driver's ResourceSlices for this node"
    assert (status, reasons(outcome)) == (3, f"there is no DeviceClass gpu.nvidia.com; {remedy}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "dra.hugepages-32m",
            "this node has no hugepages of the size that DeviceClass dra.hugepages-32m selects",
        ),
        (
            "dra.memory-far",
            "this node has no memory that DeviceClass dra.memory-far selects: none of its NUMA nodes without CPUs",
        ),
    ],
)
def test_the_machine_is_named_as_the_reason_for_this_drivers_missing_class(
    name: str, why: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chart creates the driver's classes, so adding the class to the files is not the remedy."""
    file = written(tmp_path / "c.yaml", claim("c", {"name": "a", "exactly": {"deviceClassName": name}}))
    status, outcome, _ = run(capsys, "--host-root", str(root), "--claim", file)
    assert status == 3
    assert why in reasons(outcome)
    assert "add it to the files" not in reasons(outcome)


def nic_slice(name: str, **spec: Any) -> dict[str, Any]:
    """Returns a slice with one device."""
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": f"nic-{name}"}]
    return {
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {"driver": "nic", "pool": pool, "devices": devices, **spec},
    }


def test_slices_of_other_nodes_are_ignored(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The input may contain all of the cluster's slices, but only those of one node and those that do not belong to a
    single node are used. If several nodes are possible, the error asks for --node.
    """
    selector = {"cel": {"expression": 'device.driver == "nic"'}}
    nics = {"kind": "DeviceClass", "metadata": {"name": "nic"}, "spec": {"selectors": [selector]}}
    wanted = [nics, claim("c", request("r", of="nic", allocationMode="All"))]
    near, far, free = nic_slice("a", nodeName="a"), nic_slice("b", nodeName="b"), nic_slice("all", allNodes=True)
    either = nic_slice("either", perDeviceNodeSelection=True)
    either["spec"]["devices"] = [{"name": "one", "nodeName": "a"}, {"name": "two", "nodeName": "b"}]
    ours = {**far, "metadata": {"name": "ours"}, "spec": {**far["spec"], "driver": "dra.cpu", "nodeName": "c"}}

    def devices(*slices: dict[str, Any], node: str = "") -> set[str]:
        file = written(tmp_path / "c.yaml", *wanted, *slices)
        named = ["--node", node] if node else []
        status, outcome, err = run(capsys, "--host-root", str(root), "--claim", file, *named)
        if status == 2:
            return {err}
        return {
            one["device"] for row in outcome["outcomes"] for each in row.get("claims", ()) for one in each["devices"]
        }

    assert devices(near, far, free, node="a") == {"nic-a", "nic-all"}
    assert devices(near, far, either, node="b") == {"nic-b", "two"}
    # The driver's own slices show that node c belongs to this cluster.
    assert devices(near, far, free, ours, node="c") == {"nic-all"}
    # A captured machine rarely contains its node's name.
    assert devices(near, free) == {"nic-a", "nic-all"}
    (refusal,) = devices(near, far, either)
    assert "belong to 2 nodes (a, b): select one of them with --node NAME" in refusal
    assert "kubectl get resourceslices --field-selector spec.nodeName=NAME -o yaml" in refusal
    (refusal,) = devices(either, free)
    assert "belong to 2 nodes (a, b)" in refusal


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Returns a pod that uses the claim ``c`` under the name ``numa``."""
    inner = {"resourceClaims": [{"name": "numa", "resourceClaimName": "c"}], "containers": list(containers), **spec}
    return {"kind": "Pod", "metadata": {"name": "p"}, "spec": inner}


def container(name: str, **more: Any) -> dict[str, Any]:
    """Returns a container that uses the claim."""
    return {"name": name, "resources": {"claims": [{"name": "numa"}]}, **more}


def test_problems_that_would_occur_later_are_noted(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notes warn that two containers would use one claim at the same time, and that the pod would be BestEffort and
    therefore killed first when memory runs out. Neither problem keeps the claims from fitting.
    """
    asked = claim("c", request("a", amount=2))
    shared = {"apiVersion": "v1alpha1", "cpuConfig": {"sharing": "pod"}}
    both = claim("c", request("a", amount=2), config=[{"opaque": {"driver": "dra.cpu", "parameters": shared}}])
    sidecar = container("log", restartPolicy="Always")
    said = {"resources": {"requests": {"cpu": "2"}}}
    cases: list[tuple[list[dict[str, Any]], list[str]]] = [
        ([asked, pod(container("a"), container("b"))], ["a and b use claim c", "BestEffort"]),
        ([asked, pod(container("a"), initContainers=[container("first")], **said)], []),
        ([asked, pod(container("a"), initContainers=[sidecar], **said)], ["log and a use claim c"]),
        ([both, pod(container("a"), container("b"), **said)], []),
    ]
    for documents, notes in cases:
        file = written(tmp_path / "p.yaml", *documents)
        status, outcome, _ = run(capsys, "--host-root", str(root), "--pod", file)
        (row,) = outcome["outcomes"]
        found = sorted(row.get("notes", []), reverse=True)
        assert (status, len(found)) == (0, len(notes)), found
        assert all(any(note in text for text in found) for note in notes)


def test_pods_that_name_the_same_claim_are_noted(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a cluster, the claim is allocated once, and the second pod that names it is refused. The simulation gives each
    pod a claim of its own, so the output must point out the difference. Pods in different namespaces name different
    claims.
    """
    said = {"resources": {"requests": {"cpu": "2"}}}
    asked, one = claim("c", request("a", amount=2)), pod(container("a"), **said)
    other = {**one, "metadata": {"name": "q"}}
    template = {"metadata": {}, "spec": one["spec"]}
    spread = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}}
    spread["spec"] = {"replicas": 3, "template": template}
    elsewhere = [{**each, "metadata": {**each["metadata"], "namespace": "ns"}} for each in (asked, other)]
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([asked, one, other], "2 pods name claim c"),
        ([asked, spread], "3 pods name claim c"),
        ([asked, one, *elsewhere], ""),
    ]
    for documents, note in cases:
        file = written(tmp_path / "p.yaml", *documents)
        status, outcome, _ = run(capsys, "--host-root", str(root), "--pod", file)
        found = [[text for text in row.get("notes", []) if "name claim" in text] for row in outcome["outcomes"]]
        assert (status, [[note in text for text in texts] for texts in found]) == (
            0,
            [[True] * bool(note)] * len(found),
        )


def test_a_node_without_hugepages_is_named_as_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The node's kernel supports the page size but has no pages of that size, so there is no device. The cause is
    printed first.
    """
    empty = {
        f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/{name}": "0"
        for node in (0, 1)
        for name in ("nr_hugepages", "free_hugepages")
    }
    bare = write_tree(captured(FITTING).changed(empty), tmp_path / "bare")
    file = written(tmp_path / "claim.yaml", claim("c", request("p", "dra.hugepages-2m", "64Mi")))
    _, outcome, _ = run(capsys, "--host-root", str(bare), "--claim", file)
    assert reasons(outcome).startswith("request p: this node has no 2Mi hugepages: no device on this node is of class")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "needs --claim FILE or --pod FILE"),
        (["--claim", "missing.yaml"], "missing.yaml: cannot be read"),
        (["--pod", str(EXAMPLES / "kubevirt.yaml")], "simulate the Pod virt-launcher-"),
        (["--claim", str(EXAMPLES / "existing-pods" / "extended-resource.yaml")], "has no ResourceClaim"),
    ],
)
def test_the_exit_status_for_unusable_input_is_2(
    arguments: list[str], text: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single line names the file and describes the error."""
    status, outcome, err = run(capsys, "--host-root", str(root), *arguments)
    assert (status, outcome, err.count("\n")) == (2, None, 1)
    assert text in err


@pytest.mark.parametrize("times", ["0", "-1", "x", "1025", "٣"])
def test_the_number_of_replicas_is_limited(times: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo must not cause hours of simulation."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["simulate", "--claim", "x", "-n", times])
    assert caught.value.code == 2
    assert "from 1 to 1024" in capsys.readouterr().err


def test_cpus_of_a_device_with_several_nodes_are_near_the_joined_device(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulation prepares claims as the driver does. CPUs are on the same NUMA node as the memory or the other
    driver's device that the constraint joins them with. If that node has too few free CPUs, the claim is refused.
    """
    config = written(tmp_path / "config.yaml", {"groupBy": "machine", "reservedCPUs": "0"})
    numa = "resource.kubernetes.io/numaNode"
    selector = {"selectors": [{"cel": {"expression": 'device.attributes["dra.cpu"].numaNodeID == 1'}}]}
    near_memory = [request("cpus", amount=4), request("memory", "dra.memory", "1Gi", **selector)]
    near_gpu = [request("cpus", amount=4), request("gpu", "gpu.example.com")]
    for number, wanted in enumerate([near_memory, near_gpu]):
        document = claim("c", *wanted, constraints=[{"matchAttribute": numa}])
        path = written(tmp_path / f"{number}.yaml", document, *foreign("gpu.example.com", numa))
        arguments = ["--host-root", str(root), "--config", config, "--claim", path, "-n", "5"]
        status, outcome, _ = run(capsys, *arguments)
        rows = [row["claims"][0]["devices"] for row in outcome["outcomes"] if row["fits"]]
        assert {int(cpu) % 16 >= 8 for row in rows for cpu in _ids(row[0]["cpus"])} == {True}
        if wanted is near_memory:
            assert (status, outcome["fit"]) == (3, 4)
            assert "matchAttribute resource.kubernetes.io/numaNode requires 4 CPUs" in reasons(outcome)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a host root with two NUMA nodes of 16 CPUs each. Each of these nodes has HBM next to it, and CXL memory
    is equally far from both.
    """
    return str(write_tree(captured(FITTING).changed(far_memory()), tmp_path_factory.mktemp("kinds")))


def documented_claim() -> dict[str, Any]:
    """Returns the example from docs/memory.md: a claim for CPUs and the nearest HBM."""
    text = (EXAMPLES.parent / "docs" / "memory.md").read_text()
    block = next(part.partition("```")[0] for part in text.split("```yaml\n") if "hbm" in part.partition("```")[0])
    devices = yaml.safe_load(block)["devices"]
    return claim("hbm", *devices.pop("requests"), **devices)


@pytest.mark.parametrize("group_by", ["numanode", "socket", "machine"])
def test_a_claim_gets_cpus_and_the_hbm_nearest_to_them(
    group_by: str, kinds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first HBM to be allocated is on node 2, which is next to node 1's CPUs. The HBM on node 3 is next to node 0's
    CPUs.
    """
    config = written(tmp_path / "config.yaml", {"groupBy": group_by})
    arguments = ["--host-root", kinds, "--config", config, "--claim", written(tmp_path / "c.yaml", documented_claim())]
    status, outcome, err = run(capsys, *arguments, "-n", "2")
    assert (status, err) == (0, "")
    pairs = []
    for row in outcome["outcomes"]:
        found = {one["request"]: one for one in row["claims"][0]["devices"]}
        (node,) = {int(cpu % 16 >= 8) for cpu in _ids(found["cpus"]["cpus"])}
        pairs.append((found["hbm"]["numaNode"], node, len(_ids(found["cpus"]["cpus"]))))
    assert sorted(pairs) == [(2, 1, 8), (3, 0, 8)]


def test_cpus_near_cxl_memory_are_on_one_of_the_nearest_nodes(
    kinds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both nodes are equally near to the memory, so once node 0's CPUs are in use, a claim gets node 1's CPUs."""
    selector = {"selectors": [{"cel": {"expression": 'device.attributes["dra.memory"].kind == "cxl"'}}]}
    wanted = [request("cpus", amount=12), request("cxl", "dra.memory-far", "1Gi", **selector)]
    document = claim("c", *wanted, constraints=[{"matchAttribute": "dra.cpu/nearestNumaNode"}])
    arguments = ["--host-root", kinds, "--claim", written(tmp_path / "c.yaml", document), "-n", "3"]
    status, outcome, _ = run(capsys, *arguments)
    assert (status, outcome["fit"]) == (3, 2)
    given = [{one["device"] for one in row["claims"][0]["devices"]} for row in outcome["outcomes"][:2]]
    assert given == [{f"cpudevnuma00{node}", "memory-numa004"} for node in (0, 1)]


def test_a_claim_is_refused_if_too_few_cpus_near_the_hbm_are_free(
    kinds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler knows only the device's total, so it accepts the third claim, which Prepare refuses."""
    config = written(tmp_path / "config.yaml", {"groupBy": "machine", "withheldCPUs": 0})
    document = documented_claim()
    for one in document["spec"]["devices"]["requests"]:
        if one["name"] == "hbm":
            one["exactly"]["capacity"] = {"requests": {"size": "1Gi"}}
    arguments = ["--host-root", kinds, "--config", config, "--claim", written(tmp_path / "c.yaml", document)]
    status, outcome, _ = run(capsys, *arguments, "-n", "3")
    assert (status, outcome["fit"]) == (3, 2)
    assert outcome["outcomes"][2]["stage"] == "preparing"
    assert "matchAttribute dra.cpu/nearestNumaNode requires 8 CPUs for request cpus near memory-numa002" in reasons(
        outcome
    )


def _ids(text: str) -> list[int]:
    return sorted(parse_cpu_list(text))


def test_the_shared_pool_contains_no_offline_cpu() -> None:
    """If claims hold all other CPUs, the pool consists of the online reserved CPUs."""
    inventory = build_inventory(machine(offline=frozenset({7})), Config(reserved_cpus=frozenset({0, 7})), NODE)
    assert Simulation(inventory, Config(), {}).pool() == "1-6"
    assert Simulation(inventory, Config(), {}, files_of(cpu_record("u", "r=1-6"))).pool() == "0"
