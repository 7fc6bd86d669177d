# SPDX-License-Identifier: Apache-2.0
"""The sequence of the demo: a node starts, a claim is prepared and released, and the expected state is checked and
shown after each step.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from numa_contract.cpuset import format_cpu_list

from tests.demo.plan import Plan, Published, make_plan, published
from tests.demo.tables import amount, heading, say, table
from tests.stage.pods import Box, StagePod, claim_pod, cpu_set
from tests.stage.process import StageError, wait_for
from tests.stage.stage import Stage
from tests.stage.wires import ask_unix


class UnexpectedStateError(Exception):
    """Raised if the state after a step of the demo is not as expected."""


def must(fact: bool, text: str) -> None:
    """Raises UnexpectedStateError with this message if the condition is false."""
    if not fact:
        raise UnexpectedStateError(text)


def play(stage: Stage) -> str:
    """Runs the whole demo and returns a one-sentence summary."""
    devices = _start(stage)
    plan = make_plan(devices)
    web = StagePod(stage, "web")
    plain = web.run("web")
    times = Timeline(stage, plain)
    times.note("before the claim")
    db = claim_pod(stage, "db", *plan.requests)
    _claim(stage, db, plan)
    claimed = _record(stage, db, plan)
    times.wait(lambda now: not now & claimed, "the plain container leaves the claimed CPUs")
    times.note("claim prepared, no container yet")
    with_claim = db.run("db")
    _containers(stage, plan, with_claim, plain, claimed)
    times.note("claim container runs")
    _curl(stage, db)
    whole = times.seen[0]
    db.end()
    times.wait(lambda now: now == whole, "the plain container gets the CPUs back after unprepare")
    times.note("after unprepare")
    times.show(claimed)
    must(not list(stage.paths.cdi_dir.glob("*.json")), "no CDI file is left after unprepare")
    web.end()
    return _sentence(plan, claimed)


def _start(stage: Stage) -> list[Published]:
    heading("Start: dra-frontend and nri-backend with a fake API server, kubelet and container runtime")
    instance = stage.add_ready_instance()
    table(
        ("PROCESS", "PID", "MEMORY"),
        [(p.name.removesuffix("-0"), p.pid, f"{p.rss_bytes() / 1e6:.0f} MB") for p in instance.processes],
    )
    machine = stage.state("/v1/machine")
    heading(f"The machine: CPUs {machine['cpus']}, cores: {machine['cores']}, packages: {machine['packages']}")
    rows = []
    for node in machine["numaNodes"]:
        pages = ", ".join(f"{one['total']} x {one['pageSize']}" for one in node["hugepages"] if one["total"])
        rows.append((node["id"], node["cpus"] or "none", amount(node["memoryBytes"]), pages or "none"))
    table(("NUMA NODE", "CPUS", "MEMORY", "HUGEPAGES"), rows)
    must(cpu_set(machine["cpus"]) == cpu_set(stage.settings.machine_cpus()), "discovery finds the online CPUs")
    heading("The devices, as published in ResourceSlices")
    devices = published(stage.slices())
    shown = [
        (d.name, d.kind, d.numa_node, d.capacity if d.driver == "dra.cpu" else amount(d.capacity), d.pool)
        for d in devices
    ]
    table(("DEVICE", "OFFERS", "NUMA NODE", "CAPACITY", "POOL"), shown)
    must(bool(devices), "at least one device is published")
    return devices


def _claim(stage: Stage, pod: StagePod, plan: Plan) -> None:
    heading(f"A claim on NUMA node {plan.numa_node}, allocated by the scheduler and prepared for the kubelet")
    if not plan.cpus:
        say("   This machine has a single CPU, which is reserved for the system: the claim is for memory only.")
    pod.prepare()
    allocation = (pod.claim or {})["status"]["allocation"]["devices"]["results"]
    rows = []
    for result in allocation:
        (taken,) = result["consumedCapacity"].values()
        rows.append((result["request"], result["driver"], result["device"], taken))
    table(("REQUEST", "DRIVER", "DEVICE", "ALLOCATED"), rows)
    must(len(pod.cdi_ids) == len(allocation), "every request has a CDI device")


def _record(stage: Stage, pod: StagePod, plan: Plan) -> set[int]:
    """Shows the records and a CDI file; returns the claimed CPUs."""
    records = stage.state(f"/v1/claims/{pod.claim_uid}")
    heading(f"The claim's record: what was allocated to each request (claim {pod.claim_uid})")
    rows: list[tuple[object, ...]] = []
    claimed: set[int] = set()
    for record in records:
        claimed |= {cpu for given in record["cpus"] for cpu in cpu_set(given["cpus"])}
        rows += [(given["request"], given["device"], f"CPUs {given['cpus']}") for given in record["cpus"]]
        rows += [
            (given["request"], given["device"], f"{amount(given['size'])} of node {given['numaNode']}")
            for given in record["memory"]
        ]
    table(("REQUEST", "DEVICE", "ALLOCATED"), rows)
    must(len(claimed) == plan.cpus, f"the claim has {plan.cpus} exclusive CPUs")
    files = sorted(stage.paths.cdi_dir.glob("*.json"))
    must(len(files) == len(records), "each driver has written one CDI file")
    heading("The claim's CDI files, which the runtime reads; each contains its record as an annotation")
    for file in files:
        _show_file(file)
    return claimed


def _show_file(file: Path) -> None:
    document = json.loads(file.read_text())
    annotations = document.get("annotations") or {}
    document["annotations"] = {key: f"... {len(value)} bytes of JSON ..." for key, value in annotations.items()}
    say(f"   {file.name}")
    for line in json.dumps(document, indent=1).splitlines():
        say(f"      {line}")


def _containers(stage: Stage, plan: Plan, with_claim: Box, plain: Box, claimed: set[int]) -> None:
    heading("The resources of each container, from its cgroup's files (in a fake tree here)")
    pages = [f"hugetlb.{_oci_size(page)}.max" for page in plan.hugepages]
    files = ["cpuset.cpus.effective", "cpuset.mems.effective", *pages]
    boxes = (("with the claim", with_claim), ("plain", plain))
    table(("CONTAINER", *files), [(name, *(box.read(file) for file in files)) for name, box in boxes])
    if claimed:
        must(with_claim.cpus() == claimed, "the claim's container has exactly the claimed CPUs")
    must(not plain.cpus() & claimed, "the plain container has none of the claimed CPUs")
    must(bool(plain.cpus()), "the plain container has CPUs left")
    if plan.memory or plan.hugepages:
        mems = with_claim.read("cpuset.mems.effective")
        must(mems == str(plan.numa_node), f"the memory comes from the claim's node, not from {mems}")
    for page, file in zip(plan.hugepages, pages, strict=True):
        for place in (with_claim.directory, with_claim.directory.parent):
            limit = (place / file).read_text().strip()
            must(limit == str(plan.hugepages[page]), f"{file} is the claimed size in container and pod, not {limit}")


def _oci_size(page: str) -> str:
    return page.upper() + "B"


class Timeline:
    """The shared pool and the plain container's CPUs over time."""

    def __init__(self, stage: Stage, plain: Box) -> None:
        self._stage = stage
        self._plain = plain
        self._rows: list[tuple[str, str, str]] = []
        self.seen: list[set[int]] = []

    def wait(self, condition: Any, what: str) -> None:
        """Waits until the plain container has the expected CPUs."""
        try:
            wait_for(what, lambda: condition(self._plain.cpus()))
        except StageError as error:
            raise UnexpectedStateError(f"{what}, but it has {format_cpu_list(self._plain.cpus())}") from error

    def note(self, moment: str) -> None:
        """Waits until the backend reports the current pool, which takes up to a second, and records the state."""
        cpus = self._plain.cpus()
        wait_for(f"the backend to report the pool {format_cpu_list(cpus)}", lambda: self._pool() == cpus)
        self._rows.append((moment, format_cpu_list(self._pool()), format_cpu_list(cpus)))
        self.seen.append(cpus)

    def _pool(self) -> set[int]:
        return cpu_set(self._stage.state("/v1/backend")["status"]["pool"])

    def show(self, claimed: set[int]) -> None:
        """Prints all recorded states."""
        heading("The shared pool, and the plain container's CPUs")
        table(("WHEN", "POOL", "PLAIN CONTAINER"), self._rows)
        before, prepared, during, after = self.seen
        must(before == after, "the pool is the same after the claim as before")
        must(prepared == during == before - claimed, "the pool shrinks by the claim's CPUs on Prepare")


def _curl(stage: Stage, pod: StagePod) -> None:
    socket = stage.paths.run_dir / "state.sock"
    path = "/v1/cpus"
    curl = shutil.which("curl")
    heading(f"curl --unix-socket {socket} http://node{path}")
    if curl:
        command = [curl, "--silent", "--show-error", "--fail", "--unix-socket", str(socket), f"http://node{path}"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        must(answer.returncode == 0, f"curl should get an answer, but failed: {answer.stderr.strip()}")
        cpus = json.loads(answer.stdout)
    else:
        say("   curl is not installed, so Python sends the same request")
        cpus = ask_unix(socket, path)
    for cpu in cpus[:8]:
        say(f"   {json.dumps(cpu)}")
    if len(cpus) > 8:
        say(f"   ... {len(cpus) - 8} more")
    owned = {cpu["cpu"] for cpu in cpus if cpu.get("claimUid") == pod.claim_uid}
    (record, *_) = stage.state(f"/v1/claims/{pod.claim_uid}")
    held = {number for given in record["cpus"] for number in cpu_set(given["cpus"])}
    must(owned == held, "the state endpoint names the claim as the holder of its CPUs")


def _sentence(plan: Plan, claimed: set[int]) -> str:
    given = [f"CPU(s) {format_cpu_list(claimed)}"] if claimed else []
    given += [amount(plan.memory) + " of memory"] if plan.memory else []
    given += [f"{amount(size)} of {page} hugepages" for page, size in plan.hugepages.items()]
    others = "a plain container left these CPUs before it started and got them back afterwards, " if claimed else ""
    return (
        f"a claim for {', '.join(given)} on NUMA node {plan.numa_node} became a container pinned to exactly "
        f"these resources, {others}and everything has ended cleanly."
    )
