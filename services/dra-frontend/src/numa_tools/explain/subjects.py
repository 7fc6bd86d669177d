# SPDX-License-Identifier: Apache-2.0
"""Explains one of this node's claims, pods, CPUs or devices."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from dra_frontend.allocation.entitlement import claimed_cpu_use
from dra_frontend.devices.model import CpuDevice, Device
from numa_contract.cdi import ClaimFile
from numa_contract.cpuset import format_cpu_list
from numa_contract.quantity import format_quantity
from numa_contract.records import AllocationRecord

from numa_tools.explain.enforced import Problem, container_view, problem, problems_of, refused_remedy
from numa_tools.explain.snapshot import NodeSnapshot
from numa_tools.explain.why import claim_name, cpu_reasons
from numa_tools.render import cpu_use

Explanation = tuple[dict[str, Any], list[Problem]]
KINDS: Final = ("claim", "pod", "cpu", "device")
# Without ``cpu/``, a number is interpreted as a CPU only if it has at most five digits, since a claim's name may also
# consist of digits.
_CPU = re.compile(r"(?:cpu)?(\d{1,5})|cpu/(\d{1,9})", re.ASCII)


class UnknownSubjectError(Exception):
    """Raised if no claim, pod, CPU or device has the given name. The message lists the sources that were searched."""


def split_kind(subject: str) -> tuple[str, str]:
    """Splits a subject, such as ``claim/NAME``, ``cpu/3``, ``cpu3`` or ``3``, into kind and name.

    A bare name has no kind.

    Raises UnknownSubjectError if ``cpu/`` is followed by something other than a single CPU number.
    """
    if match := _CPU.fullmatch(subject):
        return "cpu", match[1] or match[2]
    kind, _, name = subject.partition("/")
    if kind == "cpu" and name:
        raise UnknownSubjectError("a CPU must be a single number, such as cpu/3")
    return (kind, name) if kind in KINDS and name else ("", subject)


def explain_subject(snapshot: NodeSnapshot, subject: str) -> Explanation | None:
    """Returns a subject's explanation, or None if the subject is unknown on this node.

    Raises UnknownSubjectError if ``cpu/`` is followed by something other than a single CPU number.
    """
    kind, name = split_kind(subject)
    if kind == "cpu":
        return explain_cpu(snapshot, int(name))
    if kind in ("", "device") and name in snapshot.devices:
        return explain_device(snapshot, name)
    if kind in ("", "claim") and (uids := _claims_named(snapshot, name)):
        return _merged([explain_claim(snapshot, uid) for uid in uids], "claims")
    if kind in ("", "pod") and (uids := _pods_named(snapshot, name)):
        return _merged([explain_pod(snapshot, uid) for uid in uids], "pods")
    return None


def _merged(found: Sequence[Explanation], key: str) -> Explanation:
    if len(found) == 1:
        return found[0]
    return {key: [one for one, _ in found]}, [each for _, problems in found for each in problems]


def _matches(asked: str, namespace: str, name: str, uid: str) -> bool:
    return asked in (uid, name, f"{namespace}/{name}")


def _claims_named(snapshot: NodeSnapshot, asked: str) -> list[str]:
    claims = {record.claim.uid: record.claim for record in snapshot.ledger.records}
    return [uid for uid, claim in claims.items() if _matches(asked, claim.namespace, claim.name, uid)]


def _pods_named(snapshot: NodeSnapshot, asked: str) -> list[str]:
    return sorted({uid for uid, namespace, name in _pods(snapshot) if _matches(asked, namespace, name, uid)})


def _pods(snapshot: NodeSnapshot) -> set[tuple[str, str, str]]:
    """Returns the UID, namespace and name of every known pod."""
    reserved = {(pod.uid, one.claim.namespace, pod.name) for one in snapshot.ledger.records for pod in one.reserved_for}
    return reserved | {(one.pod_uid, one.pod_namespace, one.pod_name) for one in snapshot.containers}


def explain_claim(snapshot: NodeSnapshot, uid: str) -> Explanation:
    """Returns a prepared claim's resources, the reasons why they were chosen, and how they are enforced."""
    records = snapshot.records_of(uid)
    first = records[0]
    found: dict[str, Any] = {
        "claim": first.claim.full_name,
        "uid": uid,
        "state": "prepared",
        "pods": [pod.name for pod in first.reserved_for],
        "sharing": first.sharing,
        "has": [row for record in records for row in _allocated_rows(snapshot, record)],
        "containers": [container_view(snapshot, one) for one in snapshot.users(uid)],
    }
    if any(record.rebuilt for record in records):
        found["rebuilt"] = "the record was lost and rebuilt from the CPUs of the claim's containers"
    return found, problems_of(snapshot, records)


def _allocated_rows(snapshot: NodeSnapshot, record: AllocationRecord) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for part in record.cpus:
        source = {"driver": record.driver, "request": part.request, "device": part.device}
        rows.append({**source, "cpus": format_cpu_list(part.cpus), "why": cpu_reasons(snapshot, record, part)})
    for memory in record.memory:
        source = {"driver": record.driver, "request": memory.request, "device": memory.device}
        parameters = record.memory_parameters_of(memory.request).model_dump(mode="json", exclude_defaults=True)
        amount = {"bytes": memory.size, "pageBytes": memory.page_bytes, "numaNode": memory.numa_node}
        rows.append({**source, **amount, **({"parameters": parameters} if parameters else {})})
    return rows


def explain_pod(snapshot: NodeSnapshot, uid: str) -> Explanation:
    """Returns a pod's claims and containers."""
    reports = [one for one in snapshot.containers if one.pod_uid == uid]
    # The backend's reports on the containers are searched in addition to the records, because a rejected container may
    # name a claim whose record does not name the pod yet.
    named = frozenset[str]().union(*(one.named_claims for one in reports))
    records = snapshot.ledger.records
    claims = {one.claim.uid: None for one in records if one.reserves(uid) or one.claim.uid in named}
    names = {(namespace, name) for each, namespace, name in _pods(snapshot) if each == uid}
    found = [explain_claim(snapshot, claim) for claim in claims]
    problems = [each for _, several in found for each in several]
    view = {
        "pod": "/".join(min(names)),
        "uid": uid,
        "claims": [one for one, _ in found],
        "containers": [container_view(snapshot, one) for one in reports],
    }
    refused = [one for one in reports if one.refused and all(one.refused != each["why"] for each in problems)]
    problems += [problem(f"container {one.name} was refused", one.refused, refused_remedy(one)) for one in refused]
    return view, problems


def explain_cpu(snapshot: NodeSnapshot, number: int) -> Explanation | None:
    """Returns a CPU's location and user, and the mechanism that keeps other processes off it.

    Returns None if the CPU does not exist.
    """
    machine = snapshot.inventory.machine
    uid = snapshot.ledger.cpu_holders().get(number)
    cpu = machine.cpus.get(number)
    if cpu is None and uid is None and number not in machine.offline | machine.possible:
        return None
    found: dict[str, Any] = {"cpu": number, "online": cpu is not None}
    if cpu is not None:
        siblings = {one.id for one in machine.cpus.values() if one.core == cpu.core}
        found |= {"core": format_cpu_list(siblings), "l3": cpu.l3, "numaNode": cpu.numa_node, "socket": cpu.package}
        found |= {"coreType": str(cpu.core_type), "isolcpus": number in machine.isolcpus}
    devices = [name for name, (_, one) in snapshot.devices.items() if isinstance(one, CpuDevice) and number in one.cpus]
    found["device"] = devices[0] if devices else None
    found["use"] = _use(snapshot, number, uid, online=cpu is not None)
    if uid is None:
        return found, []
    if not snapshot.records_of(uid):
        return found | {"claimUid": uid}, []
    claim, problems = explain_claim(snapshot, uid)
    if cpu is None:
        problems.append(
            problem(
                f"CPU {number} is offline",
                "it is allocated to a claim",
                f"echo 1 > /sys/devices/system/cpu/cpu{number}/online",
            )
        )
    return found | {"claim": claim["claim"], "claimUid": uid, "containers": claim["containers"]}, problems


def _remark(snapshot: NodeSnapshot, uid: str) -> str:
    if snapshot.records_of(uid):
        return ""
    if any(uid == other for _, other in snapshot.releasing):
        return ", which is being released: one of its containers may still be running"
    return ", whose record is unknown"


def _use(snapshot: NodeSnapshot, number: int, uid: str | None, *, online: bool) -> str:
    """Describes a CPU's use: the same term as on the web page, followed by the claim to which the CPU is allocated or,
    if there is none, by an explanation of the term.
    """
    if uid is not None:
        word = _use_of_claimed(snapshot, number, uid) if online else "offline"
        return f"{word}: claimed by {claim_name(snapshot, uid)}{_remark(snapshot, uid)}"
    reserved = number in snapshot.inventory.reserved_cpus
    if not online:
        return cpu_use("offline") + (", even though reservedCPUs includes it" if reserved else "")
    if reserved:
        return f"{cpu_use('reserved')} (reservedCPUs)"
    if number in snapshot.inventory.withheld_cpus:
        return f"{cpu_use('withheld')} (withheldCPUs)"
    return cpu_use("pool")


def _use_of_claimed(snapshot: NodeSnapshot, number: int, uid: str) -> str:
    record = next((one for one in snapshot.records_of(uid) if one.cpus), None)
    users = [one for one in snapshot.containers if one.alive and any(use.uid == uid for use in one.claims)]
    return claimed_cpu_use(record, number, users[-1].exclusivity if users else "")


def explain_device(snapshot: NodeSnapshot, name: str) -> Explanation:
    """Returns a device's capacity, the amount allocated to each user, and the free amount."""
    driver, device = snapshot.devices[name]
    shown = next((one for one in snapshot.published if one.name == name), None)
    binary = not isinstance(device, CpuDevice)
    # A claim that is being released may have the same name as the claim that replaces it. Their amounts are then added.
    claimed = Counter[str]()
    for (owner, uid), file in sorted({**snapshot.releasing, **snapshot.files}.items()):
        if owner == driver and (amount := _amount(file, device)):
            claimed[claim_name(snapshot, uid)] += amount
    found: dict[str, Any] = {
        "device": name,
        "driver": driver,
        "attributes": dict(device.attributes),
        "capacity": format_quantity(device.amount, binary=binary),
        "free": format_quantity(_free(snapshot, device), binary=binary),
        "claims": {claim: format_quantity(amount, binary=binary) for claim, amount in claimed.items()},
    }
    if isinstance(device, CpuDevice):
        found |= {"cpus": format_cpu_list(device.cpus), "freeCpus": format_cpu_list(_free_cpus(snapshot, device))}
    problems = []
    if shown and shown.health != "healthy":
        found["health"] = shown.health
        problems.append(problem(f"{name} is {shown.health}", shown.message, "see docs/live-machine.md"))
    if shown and shown.taints:
        found["taints"] = list(shown.taints)
        why = f"{', '.join(shown.taints)}: the scheduler does not allocate it"
        problems.append(problem(f"{name} is tainted", why, "see docs/live-machine.md"))
    return found, problems


def _free_cpus(snapshot: NodeSnapshot, device: CpuDevice) -> frozenset[int]:
    return device.cpus - snapshot.ledger.held_cpus()


def _free(snapshot: NodeSnapshot, device: Device) -> int:
    if isinstance(device, CpuDevice):
        return len(_free_cpus(snapshot, device))
    return max(0, device.amount - snapshot.ledger.claimed_bytes().get(device.name, 0))


def _amount(file: ClaimFile, device: Device) -> int:
    if not isinstance(device, CpuDevice):
        return file.memory.get(device.name, 0)
    if file.record is None:
        return len(file.cpus & device.cpus)
    return sum(len(part.cpus) for part in file.record.cpus if part.device == device.name)
