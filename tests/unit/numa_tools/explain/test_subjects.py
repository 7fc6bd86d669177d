# SPDX-License-Identifier: Apache-2.0
"""Explanations of claims, pods, CPUs and devices, given complete or partial information about the node."""

from dataclasses import replace
from typing import Any

import pytest
from dra_frontend.allocation.claim import parse_claim
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.machine.model import MemoryKind, MemoryTraits, NumaNode
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.records import AllocationRecord, CpuParameters
from numa_contract.reports import ContainerReport
from numa_contract.state.service import BackendDocument
from numa_tools.commands.classes import known_classes
from numa_tools.explain.enforced import problems_of
from numa_tools.explain.pending import explain_pending, joined_devices
from numa_tools.explain.snapshot import NodeSnapshot, read_backend, read_containers, read_devices, read_records
from numa_tools.explain.subjects import UnknownSubjectError, explain_subject
from numa_tools.explain.text import explanation_text

from tests.rigs.builders import NODE, claim, cpu_record, cpus, memory, memory_record, opaque, report, result
from tests.rigs.decisions import decided, view
from tests.strategies.machines import assemble, even_cores

# Each of the two NUMA nodes has two L3 groups of four cores with two threads each: CPUs 0-15, with second threads
# 16-31.
MACHINE = assemble(even_cores(2, 1, 2, 4, 2), memory=8 << 30)
ENFORCING = BackendDocument(live=True, problem="")
INVENTORY = build_inventory(MACHINE, Config(reserved_cpus=frozenset({0})), NODE)


def prepared(*claims: dict[str, Any]) -> list[AllocationRecord]:
    """Returns claims for CPUs that were prepared one after another."""
    files: dict[tuple[str, str], ClaimFile] = {}
    for number, document in enumerate(claims):
        found = view(f"u{number}", document["result"], config=document["config"])
        record = decided(found, "dra.cpu", Ledger(files), INVENTORY)
        files["dra.cpu", f"u{number}"] = ClaimFile.of(record)
    return [file.record for file in files.values() if file.record]


def asked(count: int, **fields: Any) -> dict[str, Any]:
    """Returns a claim for CPUs on NUMA node 0."""
    return {"result": cpus(count), "config": [opaque(fields)] if fields else []}


def snapshot_of(records: list[AllocationRecord], *containers: ContainerReport, **more: Any) -> NodeSnapshot:
    """Returns the state of a node that has the given records and containers."""
    files = {(one.driver, one.claim.uid): ClaimFile.of(one) for one in records}
    return NodeSnapshot(INVENTORY, Config(), files, tuple(containers), more.pop("backend", ENFORCING), **more)


def told(snapshot: NodeSnapshot, subject: str) -> tuple[Any, list[str]]:
    """Returns the explanation, and the problems in short form."""
    found = explain_subject(snapshot, subject)
    assert found is not None
    assert explanation_text(*found)
    return found[0], [one["problem"] for one in found[1]]


def why(snapshot: NodeSnapshot, subject: str) -> dict[str, Any]:
    """Returns the reasons why the claim's only request was given its CPUs."""
    reasons: dict[str, Any] = told(snapshot, subject)[0]["has"][0]["why"]
    return reasons


def verdicts(reasons: dict[str, Any]) -> dict[str, str]:
    """Returns the verdicts on the candidate sets of CPUs, keyed by CPU list."""
    return {place["cpus"]: place["verdict"] for place in reasons["places"]}


def test_the_choice_of_cpus_is_explained() -> None:
    """The tightest L3 group or node that can hold the claim is chosen. Every other candidate is listed with the reason
    why it was not chosen, and the device's other claims are listed too.
    """
    first, second, third = prepared(asked(6, fullPhysicalCores=True), asked(2), asked(4, l3="required"))
    snapshot = snapshot_of([first, second, third])
    reasons = why(snapshot, "ns/claim-u0")
    assert reasons["parameters"] == {"strategy": "packed", "fullPhysicalCores": True}
    assert reasons["shape"] == {"wholeCores": 3, "sharedCores": 0, "l3": 1, "numaNodes": "0", "sockets": "0"}
    assert reasons["taken"] == [
        {"claim": "ns/claim-u1", "cpus": "4,20"},
        {"claim": "ns/claim-u2", "cpus": "5-6,21-22"},
    ]
    assert verdicts(reasons) == {"1-3,17-19": "chosen", "7,23": "too small: 2 of 6 CPUs"}
    assert verdicts(why(snapshot, "claim/u2")) == {"16": "too small: 1 of 4 CPUs", "5-7,21-23": "chosen"}
    (alone,) = prepared(asked(4))
    assert verdicts(why(snapshot_of([alone]), "u0")) == {
        "1-3,16-19": "chosen",
        "4-7,20-23": "emptier: 8 CPUs against 7",
    }
    text = explanation_text(*(explain_subject(snapshot, "u0") or ({}, [])))
    assert "    by:    strategy: packed, fullPhysicalCores: true\n" in text
    assert "    L3 of CPU 4, NUMA node 0: 2 CPUs (7,23), whole cores: 1: too small: 2 of 6 CPUs\n" in text


def _listed(record: AllocationRecord) -> str:
    return record.model_dump(mode="json")["cpus"][0]["cpus"]  # type: ignore[no-any-return]


def test_the_choice_of_cpus_is_compared_with_an_allocation_made_now() -> None:
    """A candidate that would now be a better choice is marked as better. There are no alternatives for CPUs that the
    claim names or that belong to a removed device.
    """
    first, second = prepared(asked(7), asked(2))
    now = why(snapshot_of([second]), "claim/u1")
    assert (
        now["text"]
        == "an allocation made now would choose 1,17; some of these CPUs were not free when the claim was prepared"
    )
    assert verdicts(now) == {"1-3,16-19": "better now: a tighter fit", "4-7,20-23": "chosen"}
    (named,) = prepared(asked(2, cpuset="2-3"))
    assert "itself specifies these CPUs" in why(snapshot_of([named]), "u0")["text"]
    tomorrow = CpuParameters(core_type="of tomorrow")
    newer = named.model_copy(update={"parameters": dict.fromkeys(named.parameters, tomorrow)})
    assert "these CPUs were chosen by another release" in why(snapshot_of([newer]), "u0")["text"]
    empty = tuple(one.model_copy(update={"cpus": frozenset()}) for one in first.cpus)
    assert (
        "lists no CPUs for this request" in why(snapshot_of([first.model_copy(update={"cpus": empty})]), "u0")["text"]
    )
    gone = first.model_copy(update={"cpus": tuple(one.model_copy(update={"device": "x"}) for one in first.cpus)})
    assert "this node no longer offers x" in why(snapshot_of([gone]), "u0")["text"]


def user(record: AllocationRecord, **more: Any) -> ContainerReport:
    """Returns a container that uses the claim."""
    return report("c", claims=[{"uid": record.claim.uid, "driver": record.driver}], **more)


def test_a_claims_enforcement_is_explained() -> None:
    """The explanation says whether the kernel or the driver enforces the claim, and why. There is no problem as long as
    the cgroup agrees with the record.
    """
    (record,) = prepared(asked(2))
    said = {"cpus": _listed(record), "exclusivity": "pool", "fallbackReason": "the kernel is too old"}
    found, problems = told(snapshot_of([record], user(record, **said)), "pod/ns/p")
    assert problems == []
    (container,) = found["containers"]
    assert container["keptBy"] == "the shared pool"
    assert container["why"] == "the kernel is too old"
    status = {"instance": "i", "exclusivityReason": "nri-backend lacks the capability SYS_ADMIN"}
    backend = read_backend({"live": True, "problem": "", "status": status})
    whole_node = snapshot_of([record], user(record, **{**said, "fallbackReason": ""}), backend=backend)
    (container,) = told(whole_node, "pod/ns/p")[0]["containers"]
    assert container["why"] == "nri-backend lacks the capability SYS_ADMIN"


@pytest.mark.parametrize(
    ("more", "kernel", "text"),
    [
        ({"cpus": "0-31"}, {}, "container work of pod ns/p runs on other CPUs"),
        ({}, {"c": {"cpuset.cpus.effective": "0-31\n"}}, "container work of pod ns/p runs on other CPUs"),
        ({"refused": "its claim is another container's"}, {}, "container work of pod ns/p was refused"),
    ],
)
def test_deviations_are_problems(more: dict[str, Any], kernel: Any, text: str) -> None:
    """The kernel's current state takes precedence over the reported one."""
    (record,) = prepared(asked(2))
    snapshot = snapshot_of([record], user(record, **{"cpus": _listed(record), **more}), kernel=kernel)
    assert told(snapshot, "u0")[1] == told(snapshot, "pod-1")[1] == [text]


def test_a_claims_second_pod_is_reported_as_refused() -> None:
    """The explanations of the claim and of the second pod both report the refusal, even before the second pod is in the
    record. The first pod has no problem.
    """
    (record,) = prepared(asked(2))
    text = "dra.cpu claim ns/claim-u0 (u0) belongs to container work of pod ns/p"
    use = {"uid": "u0", "driver": "dra.cpu"}
    second = {"podUid": "pod-2", "podName": "q", "refused": text, "refusedCode": "ClaimInUse", "refusedClaims": [use]}
    snapshot = snapshot_of([record], user(record, cpus=_listed(record)), report("d", "unknown", **second))
    found, problems = told(snapshot, "pod/ns/q")
    assert [one["claim"] for one in found["claims"]] == ["ns/claim-u0"]
    assert [(one["pod"], one["state"]) for one in found["claims"][0]["containers"]] == [
        ("ns/p", "running"),
        ("ns/q", "refused"),
    ]
    assert problems == told(snapshot, "u0")[1] == ["container work of pod ns/q was refused"]
    assert "its own claim" in problems_of(snapshot, [record])[-1]["remedy"], "that of the cause, as the doctor has it"


def test_a_container_is_entitled_only_to_the_cpus_of_the_requests_that_it_names() -> None:
    """A container that names no CPU request may run anywhere."""
    record = cpu_record("u0", "a=1-2", "b=3-4")
    both, one = (
        report("c", claims=[{"uid": "u0", "driver": "dra.cpu", "requests": requests}], cpus="1-4")
        for requests in (["a", "b"], ["a"])
    )
    assert told(snapshot_of([record], both), "u0")[1] == []
    assert told(snapshot_of([record], one), "u0")[1] == ["container work of pod ns/p runs on other CPUs"]
    near = memory_record("u0", ("m", 0, 1 << 20, 4096))
    use = {"uid": "u0", "driver": "dra.memory", "requests": ["m"]}
    assert told(snapshot_of([record, near], report("c", claims=[use], cpus="5-15")), "u0")[1] == []


def test_missing_enforcement_and_missing_reports_are_findings() -> None:
    """The explanation still shows the claim's CPUs."""
    (record,) = prepared(asked(2))
    dead = snapshot_of([record], backend=BackendDocument(live=False, problem="no lease for 12 s"))
    assert told(dead, "u0")[1] == ["nothing enforces claims"]
    found, problems = told(snapshot_of([record], no_response="no such socket"), "u0")
    assert (found["has"][0]["cpus"], problems) == (_listed(record), ["enforcement is unknown"])


def test_untrusted_strings_stay_on_one_line() -> None:
    """A string from a pod or an archive can neither forge a line nor send control sequences to the terminal."""
    (record,) = prepared(asked(2))
    odd = user(
        record, name="\x1b[2J", podName="\ud800", cpus="0-31", exclusivity="pool", fallbackReason="a\nPROBLEM  b"
    )
    kernel = {"c": {"cpuset.cpus.partition": "member\n\u202e"}}
    found = explain_subject(snapshot_of([record], odd, kernel=kernel), "u0")
    assert found is not None
    lines = explanation_text(*found).split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.startswith("PROBLEM")] == [
        r"PROBLEM  container \x1b[2J of pod ns/\ud800 runs on other CPUs"
    ]


def test_cpus_are_explained() -> None:
    """A CPU is reserved, withheld from claims, shared, claimed, or not part of this machine."""
    (record,) = prepared(asked(2))
    snapshot = snapshot_of([record])
    assert told(snapshot, "0")[0]["use"] == "reserved: kept for the system (reservedCPUs)"
    assert told(snapshot, "cpu15")[0]["use"] == "pool: free to claim; all containers without a claim run here"
    number = min(record.cpus_of())
    assert told(snapshot, f"cpu/{number}")[0]["use"] == "exclusive: claimed by ns/claim-u0"
    assert told(snapshot, f"cpu/{number}")[0]["device"] == "cpudevnuma000"
    assert explain_subject(snapshot, "cpu/4000") is None
    parts = tuple(one.model_copy(update={"cpus": frozenset({900})}) for one in record.cpus)
    offline = record.model_copy(update={"cpus": parts})
    assert told(snapshot_of([offline]), "900")[1] == ["CPU 900 is offline"]


@pytest.mark.parametrize("name", ["foo", "2-3", "0,1", "1_0", "+3", " 3", "३", "9" * 5000])
def test_a_cpu_is_given_as_one_number(name: str) -> None:
    """A string that is not a number is rejected with an error message. A number beyond the machine's CPUs is reported
    as such.
    """
    with pytest.raises(UnknownSubjectError, match=r"^a CPU must be a single number, such as cpu/3$"):
        explain_subject(snapshot_of([]), f"cpu/{name}")
    assert explain_subject(snapshot_of([]), "cpu/999999999") is None


def test_devices_are_explained() -> None:
    """The remaining capacity and the claims are listed. An unhealthy or tainted device is a finding."""
    (record,) = prepared(asked(2))
    found, problems = told(snapshot_of([record]), "cpudevnuma000")
    assert (found["capacity"], found["free"], found["claims"], problems) == ("15", "13", {"ns/claim-u0": "2"}, [])
    shown = {
        "driver": "dra.memory",
        "name": "memory-numa000",
        "health": "unhealthy",
        "message": "less than claimed",
        "taints": ["dra.memory/x"],
    }
    found, problems = told(snapshot_of([], published=read_devices([shown])), "device/memory-numa000")
    assert problems == ["memory-numa000 is unhealthy", "memory-numa000 is tainted"]


def test_a_damaged_claim_files_resources_are_explained() -> None:
    """The claim's CPUs and bytes are neither free nor shared. The claim is shown by its UID, since nothing else is
    known about it.
    """
    (record,) = prepared(asked(2))
    cpus_held = ClaimFile("dra.cpu", "u8", None, frozenset({5, 6}), "damaged")
    memory_held = ClaimFile("dra.memory", "u9", None, frozenset(), "damaged", {"memory-numa000": 1 << 30})
    snapshot = snapshot_of([record])
    whole = told(snapshot, "memory-numa000")[0]["free"]
    snapshot = replace(
        snapshot, files={**snapshot.files, ("dra.cpu", "u8"): cpus_held, ("dra.memory", "u9"): memory_held}
    )
    assert told(snapshot, "5")[0]["use"] == "held: claimed by u8, whose record is unknown"
    found = told(snapshot, "cpudevnuma000")[0]
    assert (found["free"], found["claims"]) == ("11", {"ns/claim-u0": "2", "u8": "2"})
    assert found["freeCpus"] == format_cpu_list(frozenset({*range(1, 8), *range(16, 24)}) - record.cpus_of() - {5, 6})
    found = told(snapshot, "memory-numa000")[0]
    assert (whole, found["free"], found["claims"]) == ("7232Mi", "6208Mi", {"u9": "1Gi"})


def test_records_from_another_release_are_left_out() -> None:
    """One unreadable record or report does not hide the others."""
    (record,) = prepared(asked(2))
    good = record.model_dump(mode="json")
    assert list(read_records([{"version": 9}, 7, good])) == [("dra.cpu", "u0")]
    assert [one.id for one in read_containers([{}, None, report("c").model_dump(mode="json")])] == ["c"]
    assert (read_records(None), read_containers({}), read_backend([1])) == ({}, (), None)
    device = {"driver": "dra.cpu", "name": "d", "taints": ["t"], "of tomorrow": 1}
    odd = [1, "d", {"name": "d"}, {**device, "taints": 5}, {**device, "taints": [1]}, {**device, "health": 0}]
    assert [one.taints for one in read_devices([*odd, device])] == [("t",)]
    assert (read_devices({"a": 1}), read_devices(5)) == ((), ())


def pending(snapshot: NodeSnapshot, document: dict[str, Any]) -> tuple[Any, list[str]]:
    """Returns the explanation of a claim that is not prepared, and its problems in short form."""
    found, problems = explain_pending(snapshot, document, known_classes(MACHINE), NODE)
    assert explanation_text(found, problems)
    return found, [one["why"] for one in problems]


def wish(name: str, count: str) -> dict[str, Any]:
    """Returns a request for CPUs."""
    exactly = {"deviceClassName": "dra.cpu", "capacity": {"requests": {"dra.cpu/cpu": count}}}
    return {"name": name, "exactly": exactly}


def waiting(*requests: dict[str, Any]) -> dict[str, Any]:
    """Returns a claim that has not been allocated."""
    metadata = {"name": "c", "namespace": "ns", "uid": "u"}
    return {"metadata": metadata, "spec": {"devices": {"requests": list(requests)}}}


def test_a_pending_claim_is_explained() -> None:
    """The explanation says that the claim fits, or lists the shortage on each device."""
    snapshot = snapshot_of(prepared(asked(14)))
    found, problems = pending(snapshot, waiting(wish("r", "2")))
    assert (found["wouldGet"][0]["device"], problems) == ("cpudevnuma001", [])
    assert "PodScheduled" in found["waitsFor"], "the pod may be what does not fit"
    found, problems = pending(snapshot, waiting(wish("r", "2"), wish("s", "15")))
    assert [one["fits"] for one in found["requests"][0]["devices"]] == [False, True]
    assert problems == ["each request can be met, but not all of them together"]
    assert "v1beta1" in pending(snapshot, waiting({"name": "r", "deviceClassName": "dra.cpu"}))[1][0]


def test_a_pending_claim_cannot_have_cpus_that_are_being_released() -> None:
    """The scheduler considers a released claim's CPUs free, but the driver refuses them until the claim's containers
    have exited. The explanation says so instead of listing CPUs that the claim would not get.
    """
    (record,) = prepared(asked(14))
    snapshot = snapshot_of([], releasing={("dra.cpu", "u0"): ClaimFile.of(record)})
    found, (problem,) = pending(snapshot, waiting(wish("r", "15")))
    assert "wouldGet" not in found
    assert "1 free (16); CPUs of a claim that is being released become free" in problem
    found, problems = pending(snapshot, waiting(wish("r", "1")))
    assert (found["wouldGet"][0]["cpus"], problems) == ("16", [])


def test_a_device_lists_a_released_claim_and_its_replacement() -> None:
    """Both claims have the same name, and the device's free CPUs are those that neither of them holds."""
    released, record = (replace_name(one, "c") for one in prepared(asked(6), asked(4)))
    snapshot = snapshot_of([record], releasing={("dra.cpu", "u0"): ClaimFile.of(released)})
    found, _ = told(snapshot, "cpudevnuma000")
    assert (found["capacity"], found["free"], found["claims"]) == ("15", "5", {"ns/c": "10"})


def replace_name(record: AllocationRecord, name: str) -> AllocationRecord:
    """Returns the record with a different claim name."""
    return record.model_copy(update={"claim": record.claim.model_copy(update={"name": name})})


def test_a_selector_that_cannot_be_evaluated_is_named() -> None:
    """It is unknown whether the devices match and therefore whether the claim fits. The problem names the selector."""
    odd = {"name": "r", "exactly": {"deviceClassName": "dra.cpu", "selectors": [{"cel": {"expression": "1 +"}}]}}
    found, problems = pending(snapshot_of(prepared(asked(14))), waiting(odd))
    why = "request r: selectors[0]: cannot be evaluated: cannot be parsed at its end: '1 +'"
    assert problems == [why]
    rows = [(one["device"], one["fits"], one["unknown"]) for one in found["requests"][0]["devices"]]
    assert rows == [("cpudevnuma000", None, why), ("cpudevnuma001", None, why)]
    assert "wouldGet" not in found
    assert f"cpudevnuma001: unknown: {why}" in explanation_text(found, [])


def test_a_claim_that_is_allocated_but_not_prepared_is_explained() -> None:
    """For a claim on another node, the user is referred to that node. For a claim on this node, the driver's own
    refusal is shown.
    """
    snapshot = snapshot_of(prepared(asked(14)))
    elsewhere = claim("u", cpus(2))
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-b"]}]}
    elsewhere["status"]["allocation"]["nodeSelector"] = {"nodeSelectorTerms": [term]}
    assert pending(snapshot, elsewhere)[1] == ["it is allocated to node node-b"]
    assert "2 CPUs requested, 1 free" in pending(snapshot, claim("u", cpus(2)))[1][0]
    assert (
        "fits; the kubelet has not asked the driver to prepare it" in pending(snapshot, claim("u", memory("1Gi")))[1][0]
    )
    snapshot = replace(snapshot, refusal_reasons=("NRI is off",))
    assert pending(snapshot, waiting(wish("r", "2")))[1] == ["NRI is off"]
    assert pending(snapshot, claim("u", memory("1Gi")))[1][0].endswith("fits; NRI is off")


@pytest.mark.parametrize(
    ("asked_for", "refusal_reasons", "remedy"),
    [
        (cpus(2), (), "fix the cause given in the message"),
        (memory("1Gi"), (), "see the pod's Events"),
        (memory("1Gi"), ("NRI is off",), "run dra-frontend doctor"),
    ],
)
def test_the_remedy_for_an_unprepared_claim_depends_on_the_cause(
    asked_for: Any, refusal_reasons: tuple[str, ...], remedy: str
) -> None:
    """A refusal says what to change, the doctor explains the node's problems, and Events show what the kubelet has
    done.
    """
    snapshot = replace(snapshot_of(prepared(asked(14))), refusal_reasons=refusal_reasons)
    _, (found,) = explain_pending(snapshot, claim("u", asked_for), known_classes(MACHINE), NODE)
    assert found["remedy"].startswith(remedy)


def test_candidates_for_cpus_joined_with_memory_are_on_the_memorys_node() -> None:
    """matchAttribute restricts the CPUs to the memory's NUMA node."""
    inventory = build_inventory(MACHINE, Config(group_by="machine", reserved_cpus=frozenset({0})), NODE)
    document = claim("u0", cpus(2, "r", "cpudevmachine"), memory("1Gi", node=1))
    document["spec"] = {"devices": {"constraints": [{"matchAttribute": "resource.kubernetes.io/numaNode"}]}}
    record = decided(parse_claim(document), inventory=inventory)
    snapshot = replace(snapshot_of([record]), inventory=inventory)
    found, _ = told(snapshot, "claim-u0")
    why = found["has"][0]["why"]
    assert why["joined"] == {"resource.kubernetes.io/numaNode": [1]}
    assert why["text"] == "an allocation made now would choose the same CPUs"
    assert {place["place"].rpartition(" ")[2] for place in why["places"]} == {"1"}
    assert "near:  resource.kubernetes.io/numaNode 1, as matchAttribute requires" in explanation_text(found, [])


def test_candidates_for_cpus_joined_with_hbm_are_on_the_nearest_node() -> None:
    traits = MemoryTraits(MemoryKind.HBM, initiators=frozenset({1}))
    machine = replace(MACHINE, numa_nodes={**MACHINE.numa_nodes, 2: NumaNode(2, frozenset(), 8 << 30, traits=traits)})
    inventory = build_inventory(machine, Config(group_by="machine", reserved_cpus=frozenset({0})), NODE)
    document = claim("u0", cpus(2, "r", "cpudevmachine"), memory("1Gi", node=2))
    document["spec"] = {"devices": {"constraints": [{"matchAttribute": "dra.cpu/nearestNumaNode"}]}}
    record = decided(parse_claim(document), inventory=inventory)
    found, _ = told(replace(snapshot_of([record]), inventory=inventory), "claim-u0")
    why = found["has"][0]["why"]
    assert why["joined"] == {"dra.cpu/nearestNumaNode": [1]}
    assert {place["place"].rpartition(" ")[2] for place in why["places"]} == {"1"}
    document["spec"]["devices"]["constraints"][0]["matchAttribute"] = "resource.kubernetes.io/numaNode"
    text = pending(replace(snapshot_of([]), inventory=inventory), document)[1][0]
    assert "no value in common: cpudevmachine has 0, 1; memory-numa002 has 2" in text


def test_a_claim_that_cannot_be_joined_is_explained_with_prepares_refusal() -> None:
    inventory = build_inventory(MACHINE, Config(group_by="machine", reserved_cpus=frozenset({0})), NODE)
    snapshot = replace(snapshot_of([]), inventory=inventory)
    document = claim("u", cpus(2, "r", "cpudevmachine"), result("gpu", "gpu.example.com", "gpu-1", "p"))
    document["spec"] = {"devices": {"constraints": [{"matchAttribute": "resource.kubernetes.io/numaNode"}]}}
    assert joined_devices(snapshot, document) == {("gpu.example.com", "p", "gpu-1")}
    assert "the values of device p/gpu-1 are unknown" in pending(snapshot, document)[1][0]
    assert joined_devices(snapshot, {"metadata": 3}) == frozenset()
