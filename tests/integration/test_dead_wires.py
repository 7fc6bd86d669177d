# SPDX-License-Identifier: Apache-2.0
"""Observes every documented field, metric, alert, condition and Event on nodes that run both real services.

A documented metric or Event that the driver never produces is worse than none at all, because operators rely on it. The
entries are read from their sources: the contract's models, docs/metrics.md, docs/events.md and the chart's alerts. For
each new entry, a test in this module fails until a scenario below produces it or ELSEWHERE lists it.
"""

import ast
import fcntl
import inspect
import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.allocation import device_status
from numa_contract.backend_codes import BackendCode
from numa_contract.cdi import RECORD_ANNOTATION
from numa_contract.names import CLAIMS_JOURNAL
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport
from numa_contract.state.devices import CpuDocument, DeviceDocument, MemoryDocument
from numa_contract.state.machine import MachineDocument
from numa_contract.state.node import NodeDocument
from numa_contract.state.service import BackendDocument, VersionDocument
from numa_contract.state.status import StatusCode, StatusDocument
from pydantic import BaseModel

from tests.chart.helm import CHART
from tests.fakes.kubelet_static import StaticManagers
from tests.fakes.waiting import PATIENCE
from tests.rigs.trees import captured, write_tree
from tests.stage.machine import HostDirectory
from tests.stage.pods import StagePod, claim_pod, cpus, delete_claim, hugepages, memory, opaque
from tests.stage.process import wait_for
from tests.stage.settings import OUR_BACKEND, StageSettings
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError
from tests.stage.witness import Witness, fields_of

pytestmark = pytest.mark.timeout(900 * PATIENCE)

ROOT = CHART.parents[1]
MIB = 1 << 20
_NAMES = (
    *("machine", "devices", "claims", "cpus", "memory", "containers", "backend", "status", "version", "quarantine"),
    "node",
)
DOCUMENTS = tuple(f"/v1/{name}" for name in _NAMES)


# --- Entries that another test covers, in the node tests or elsewhere, with that test's pytest id. ---

_BACKEND = "tests/unit/dra_frontend/claims/test_backend.py"
_REMEDIES = "tests/integration/test_remedies.py"
_CODES = "tests/unit/nri_backend/enforcement/test_problem_codes.py"
_ISOLATION = "tests/unit/nri_backend/host_isolation/test_isolation.py"
ELSEWHERE: dict[str, str] = {
    # This metric requires a kernel that does not allow managed interrupts to be moved.
    "dra_numa_backend_immovable_interrupts": (
        "tests/node/test_interrupts.py::test_interrupts_leave_a_claims_cpus_and_are_restored"
    ),
    "/v1/status.leftOut": "tests/unit/dra_frontend/state_endpoint/test_status.py::test_the_list_is_bounded",
    # This alert requires images of different releases.
    "DraNumaVersionsDiffer": "tests/chart/test_monitoring.py::test_versions_of_both_services_are_compared",
    # These states last only for a moment, or end the process.
    StatusCode.BACKEND_NOT_REPORTED: f"{_BACKEND}::test_a_missing_first_report_and_an_unreadable_one_have_codes",
    StatusCode.BACKEND_INCOMPLETE: f"{_BACKEND}::test_each_reason_to_refuse_all_claims_has_a_code",
    StatusCode.NO_BACKEND_ENFORCES: f"{_BACKEND}::test_each_reason_to_refuse_all_claims_has_a_code",
    StatusCode.BACKEND_REPORT_UNREADABLE: f"{_BACKEND}::test_a_missing_first_report_and_an_unreadable_one_have_codes",
    StatusCode.NOT_REGISTERED: (
        "tests/integration/test_status_agrees.py::test_all_sources_agree_in_each_state_of_a_node"
    ),
    StatusCode.CLAIMS_DIRECTORY_UNUSABLE: (
        "tests/unit/dra_frontend/claims/test_reconciler.py::test_a_replaced_directory_ends_the_process"
    ),
    StatusCode.RUN_DIRECTORY_UNUSABLE: (
        "tests/unit/dra_frontend/node/test_run_directory.py::test_a_file_that_cannot_be_restored_is_reported"
    ),
    StatusCode.HUGEPAGES_UNAVAILABLE: (
        "tests/integration/test_hugepage_helper.py::test_a_helper_that_is_down_is_reported_until_it_is_back"
    ),
    StatusCode.TASK_FAILING: "tests/unit/dra_frontend/node/test_guard.py::test_a_step_that_succeeds_ends_the_warning",
    # This code requires a backend of a different release.
    StatusCode.BACKEND_PROBLEM: (
        "tests/unit/dra_frontend/state_endpoint/test_status.py::test_a_backend_problem_has_the_code_of_its_cause"
    ),
    # These codes require an incomplete pod, or a command that reads files while the service is down.
    StatusCode.POD_INCOMPLETE: (
        "tests/integration/test_preflight.py::test_a_frontend_that_cannot_start_reports_why_and_waits"
    ),
    StatusCode.SERVICE_DOWN: "tests/integration/test_doctor_and_status.py::test_commands_work_without_the_service",
    StatusCode.FILE_MISSING: (
        "tests/unit/numa_tools/commands/test_status.py::test_a_claim_whose_file_is_lost_is_named"
    ),
    # These codes require a backend container that lacks a capability, a mount or the host's user namespace. In these
    # tests the backend runs as the user who runs the tests.
    BackendCode.SYS_ADMIN_MISSING: f"{_REMEDIES}::test_the_remedy_for_a_missing_privilege_names_it",
    BackendCode.USER_NAMESPACE: f"{_REMEDIES}::test_the_remedy_for_a_missing_privilege_names_it",
    BackendCode.SECURITY_MODULE: f"{_REMEDIES}::test_the_remedy_for_a_missing_privilege_names_it",
    BackendCode.SYS_ADMIN_IN_EFFECT: (
        "tests/unit/nri_backend/node/test_privileges.py::test_a_capability_that_cannot_be_lowered_is_a_problem"
    ),
    BackendCode.DAC_OVERRIDE_MISSING: f"{_REMEDIES}::test_a_missing_dac_override_is_a_node_problem",
    BackendCode.CLAIMS_DIRECTORY_MISSING: f"{_REMEDIES}::test_the_remedy_for_a_missing_cdi_directory_names_the_volume",
    BackendCode.READ_ONLY_FILE_SYSTEM: f"{_REMEDIES}::test_the_remedy_for_a_read_only_mount_names_its_volume",
    BackendCode.INTERRUPTS_NOT_MOVED: (
        f"{_REMEDIES}::test_a_read_only_interrupt_mount_is_a_problem_if_interrupts_are_moved"
    ),
    BackendCode.KERNEL_WORKERS_STAY: (
        f"{_REMEDIES}::test_a_read_only_interrupt_mount_is_a_problem_if_interrupts_are_moved"
    ),
    # These codes require a kernel that rejects values that the fake's files accept, a kernel that has lost CPUs, or a
    # full file system.
    BackendCode.NODE_IS_CONTAINER: f"{_REMEDIES}::test_a_kernel_without_partitions_is_a_limitation_of_the_node",
    BackendCode.PERMISSION_DENIED: (f"{_CODES}::test_a_cpuset_write_that_the_kernel_denies_has_the_code_of_the_error"),
    BackendCode.PARTITION_REFUSED: f"{_CODES}::test_a_claim_enforced_by_the_pool_has_the_code_of_the_kernels_answer",
    BackendCode.CONTROLLER_MISSING: (
        f"{_CODES}::test_a_partition_without_its_controller_has_the_code_for_the_missing_file"
    ),
    BackendCode.SETTINGS_NOT_APPLIED: (
        f"{_CODES}::test_a_write_without_effect_has_the_code_for_settings_that_were_not_applied"
    ),
    BackendCode.CPUS_LOST: (
        "tests/unit/nri_backend/enforcement/test_partitions.py"
        "::test_no_partition_is_created_after_the_kernel_has_lost_cpus"
    ),
    BackendCode.NO_SPACE_LEFT: "tests/unit/nri_backend/test_problems.py::test_an_error_has_the_code_of_its_errno",
    BackendCode.ENFORCEMENT_NOT_RECORDED: (
        "tests/unit/nri_backend/enforcement/test_recorder.py"
        "::test_a_container_starts_even_if_its_enforcement_record_cannot_be_written"
    ),
    BackendCode.INTERRUPTS_MOVED_BACK: f"{_ISOLATION}::test_problems_with_interrupts_and_host_daemons_have_codes",
    BackendCode.HOST_DAEMONS_NOT_MOVED: f"{_ISOLATION}::test_problems_with_interrupts_and_host_daemons_have_codes",
    BackendCode.HOST_DAEMONS_STAY: f"{_ISOLATION}::test_problems_with_interrupts_and_host_daemons_have_codes",
    # These codes require a runtime or a pod that the stage cannot provide, a state that lasts only for a moment, or an
    # internal error in the backend.
    BackendCode.CGROUP_UNKNOWN: (
        "tests/unit/nri_backend/enforcement/test_hooks.py"
        "::test_a_claim_container_without_a_valid_cgroup_path_is_rejected"
    ),
    BackendCode.INTERNAL_ERROR: (
        "tests/unit/nri_backend/enforcement/test_audit.py"
        "::test_an_unexpected_error_in_the_first_audit_does_not_end_the_process"
    ),
    BackendCode.VARIABLES_MALFORMED: f"{_CODES}::test_malformed_variables_have_a_code",
    BackendCode.VARIABLES_FORGED: f"{_REMEDIES}::test_user_chosen_names_and_values_do_not_affect_remedies",
    BackendCode.CLAIM_NOT_RESERVED: f"{_REMEDIES}::test_user_chosen_names_and_values_do_not_affect_remedies",
    BackendCode.CLAIM_IN_USE: f"{_REMEDIES}::test_user_chosen_names_and_values_do_not_affect_remedies",
    BackendCode.CLAIMED_CPUS_OFFLINE: (
        f"{_CODES}::test_a_claim_that_the_node_cannot_enforce_has_the_code_of_the_nodes_reason"
    ),
    BackendCode.CLAIMED_CPUS_OCCUPIED: (f"{_CODES}::test_rejections_without_another_problem_have_their_reasons_code"),
    BackendCode.NO_SHARED_CPUS: f"{_CODES}::test_rejections_without_another_problem_have_their_reasons_code",
    BackendCode.NODE_OBSERVES: (
        "tests/unit/nri_backend/enforcement/test_observer.py::test_hooks_change_nothing_and_refuse_claims"
    ),
    BackendCode.NOT_ENFORCED: f"{_CODES}::test_rejections_without_another_problem_have_their_reasons_code",
}
"""Entries that no fake can produce, each with the test that covers it."""

# --- Scenarios: externally caused events on a node. ---


class Play:
    """A stage with its own machine, and the witness that records its output."""

    def __init__(self, stage: Stage, machine: HostDirectory, witness: Witness) -> None:
        self.stage = stage
        self.machine = machine
        self.witness = witness

    def until(self, what: str, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        """Waits until a condition is true, and records all output of the stage while it waits."""

        def seen() -> Any:
            self.witness.observe(self.stage)
            return condition()

        wait_for(what, seen, seconds)

    def sees(self, path: str, default: Any = None) -> None:
        """Waits until a field differs from its default."""
        self.until(path, lambda: self.witness.differs(path, default))

    def counts(self, name: str, value: float | None = None, **labels: str) -> None:
        """Waits until a metric has the given value, or any value other than 0 if none is given."""

        def counted() -> bool:
            samples = self.witness.samples[name]
            return any(
                (found != 0 if value is None else found == value) and labels.items() <= dict(its).items()
                for its, found in samples
            )

        self.until(name, counted)

    def reads(self, reason: str) -> None:
        """Waits until a claim's device has a condition with this reason."""
        self.until(reason, lambda: reason in self.witness.conditions)

    def fails(self, code: StatusCode | BackendCode) -> None:
        """Waits until the status has a problem with this code."""
        self.until(code, lambda: code in self.witness.values["/v1/status.problems[].code"])

    def warns(self, code: StatusCode) -> None:
        """Waits until the status has a warning with this code."""
        self.until(code, lambda: code in self.witness.values["/v1/status.warnings[].code"])

    def hears(self, reason: str) -> None:
        """Waits until the Event exists."""
        self.until(reason, lambda: reason in self.witness.reasons)

    def pod(self, name: str, *requests: dict[str, Any], **parameters: Any) -> StagePod:
        """Returns a pod with a prepared claim; parameters are fields of cpuConfig."""
        config = [opaque("dra.cpu", "cpuConfig", parameters)] if parameters else []
        made = claim_pod(self.stage, name, *requests, config=config)
        try:
            made.prepare()
        except AnsweredError:
            made.end()
            raise
        return made


def parameters(play: Play) -> None:
    """Prepares claims with every parameter. The records contain the parameters, so no container has to run."""
    for number, (parameter, value) in enumerate(_PARAMETERS.items()):
        with play.pod(f"tuned-{number}", cpus(2, numa_node=1), **{parameter: value}):
            play.witness.observe(play.stage)
    for number, fields in enumerate(_MEMORY_PARAMETERS):
        request = memory(64 * MIB, numa_node=1) if "mount" not in fields else hugepages(4 * MIB)
        config = [opaque("dra.memory", "memoryConfig", fields)]
        with claim_pod(play.stage, f"bound-{number}", request, config=config) as pod:
            pod.prepare()
            play.witness.observe(play.stage)


def running(play: Play) -> None:
    """Runs a container with a claim under each enforcement mechanism; interrupts are moved off the claimed CPUs."""
    with play.pod("db", cpus(2), hugepages(4 * MIB), memory(64 * MIB)) as pod, StagePod(play.stage, "web") as web:
        web.run()
        pod.run()
        play.sees("/v1/claims[].owner.container")
        play.counts("dra_numa_backend_partitioned_cpus")
    with play.pod("still", cpus(2), isolation="isolated") as pod:
        pod.run()
        play.until("isolated", lambda: "isolated" in play.witness.values["/v1/containers[].exclusivity"])
    with play.pod("vpp", cpus(2), poolCPUs="numa") as pod:
        pod.run()
        play.sees("/v1/containers[].poolRequestedBy")
        play.sees("/v1/containers[].claims[].cpus")
    with play.pod("many", cpus(14, numa_node=0), irqs="move") as pod:
        pod.run()
        play.counts("dra_numa_backend_moved_interrupts")


def refused_partition(play: Play) -> None:
    """The kernel rejects a partition because a file of the pod's cgroup cannot be written."""
    with play.pod("sad", cpus(2)) as pod:
        pod.run_sandbox()
        exclusive = play.stage.paths.cgroup_root / pod.sandbox["cgroup_parent"].lstrip("/") / "cpuset.cpus.exclusive"
        exclusive.unlink()
        exclusive.mkdir()
        pod.run()
        play.sees("/v1/cpus[].fallbackReason")
        play.sees("/v1/containers[].fallbackCode")
        play.counts("dra_numa_backend_pooled_containers")
        play.hears("CPUsKeptByPool")


def authors(play: Play) -> None:
    """Runs pods whose authors made mistakes, and a pod in which a process is OOM-killed."""
    with StagePod(play.stage, "forger") as pod:
        with pytest.raises(AnsweredError):
            pod.create(env=["DRA_CPUSET_11111111-1111-4111-8111-111111111111=0-3"])
        play.sees("/v1/containers[].refused")
        play.sees("/v1/status.problems[].cause")
        play.counts("dra_numa_backend_refusals_total")
    with play.pod("careless", cpus(1)) as pod:
        pod.sandbox = play.stage.runtime(
            "run_pod_sandbox", name=pod.name, uid=pod.uid, namespace="default", qos="besteffort"
        )
        pod.run()
        play.hears("BestEffortWithClaim")
    with claim_pod(play.stage, "greedy", memory(64 * MIB)) as pod:
        pod.prepare()
        directory = pod.run().directory
        for group in (directory, directory.parent):
            HostDirectory.write(group / "memory.events", "oom_kill 1")
        play.sees("/v1/containers[].memoryKills")
        play.counts("dra_numa_backend_memory_kills_total")
        play.hears("OutOfClaimedMemory")
    with pytest.raises(AnsweredError), play.pod("wrong", cpus(1), strategy="best"):
        pass
    play.counts("dra_numa_claims_handled_total", call="prepare", result="error")


def static_managers(play: Play) -> None:
    """The kubelet pins containers itself."""
    kubelet = StaticManagers(frozenset(range(32)), frozenset({0}), memory=True)
    with StagePod(play.stage, "guaranteed") as pod:
        pod.run(**kubelet.created("guaranteed", exclusive=2, numa_nodes=[0]))
        play.counts("dra_numa_kubelet_static_manager")
        play.hears("KubeletManagerStatic")


def released_in_use(play: Play) -> None:
    """The kubelet unprepares a claim while a container still uses it."""
    with play.pod("old", cpus(2)) as pod:
        box = pod.run()
        pod.unprepare()
        delete_claim(play.stage, "old-claim")
        pod.claim = None
        play.counts("dra_numa_claims_releasing")
        play.sees("/v1/containers[].unknownClaims[].cpus")
        box.remove()


def damaged_files(play: Play) -> None:
    """While the frontend is down, one claim file is damaged and another is removed; metadata cannot be written."""
    stage, (instance,) = play.stage, play.stage.instances
    with play.pod("hurt", cpus(2)) as pod, play.pod("lost", cpus(2)) as other:
        pod.run()
        other.run()
        instance.frontend.kill()
        (damaged,), (removed,) = (stage.paths.cdi_dir.glob(f"dra*{one.claim_uid}*") for one in (pod, other))
        removed.unlink()
        document = json.loads(damaged.read_text())
        document["annotations"][RECORD_ANNOTATION] = "{"
        damaged.write_text(json.dumps(document))
        fault = {"answer": "503", "resource": "resourceclaims", "agent": "dra-driver-numa", "count": 100}
        stage.api("/fake", "POST", {"fail_next": fault})
        instance.frontend.start()
        play.until("quarantine", lambda: True in play.witness.values["/v1/quarantine"])
        play.counts("dra_numa_records_unreadable")
        play.sees("/v1/node.lost")
        play.fails(BackendCode.CLAIM_FILES_UNREADABLE)
        stage.api("/fake", "POST", {"no_faults": True})
        play.sees("/v1/claims[].rebuilt")
        stage.wait_ready_again(instance)
    metadata = play.stage.paths.kubelet_root / "plugins/dra.cpu/dra-device-metadata"
    shutil.rmtree(metadata, ignore_errors=True)
    metadata.write_text("")
    try:
        with play.pod("bare", cpus(1)):
            play.counts("dra_numa_metadata_failures_total")
    finally:
        metadata.unlink()


def files_in_the_way(play: Play) -> None:
    """Directories exist in place of the journal and of a socket for the kubelet."""
    paths = play.stage.paths
    in_the_way = paths.run_dir / CLAIMS_JOURNAL, next(paths.kubelet_root.glob("plugins/dra.memory/*.sock"))
    for path in in_the_way:
        path.unlink()
        path.mkdir()
        (path / "file").write_text("")
    try:
        with play.pod("noted", cpus(1)):
            play.fails(StatusCode.JOURNAL_UNUSABLE)
            play.fails(StatusCode.SOCKET_NOT_PLACED)
    finally:
        for path in in_the_way:
            shutil.rmtree(path)
        play.stage.wait_ready_again(play.stage.instances[0])


def machine_changes(play: Play) -> None:
    """CPUs go offline, memory fails, host processes use hugepages, and sysfs cannot be read for a while."""
    machine, pods = play.machine, play.stage.paths.cgroup_root / "kubepods.slice"
    with play.pod("db", cpus(4, numa_node=1)) as pod:
        lost = {max(play.stage.held(pod.claim_uid))}
        machine.take_offline(lost)
        play.sees("/v1/machine.offline")
        play.until("an offline CPU", lambda: "offline" in play.witness.values["/v1/cpus[].use"])
        machine.take_online(lost)
    machine.take_offline({16})
    play.sees("/v1/machine.warnings")
    play.hears("ConfigurationDoesNotFit")
    machine.take_online({16})
    machine.set_errors(1, "Skylake Socket#1 IMC#0", "CPU_SrcID#1_MC#0_Chan#0_DIMM#0", ue=1)
    machine.write(play.machine.root / "sys/devices/system/edac/mc/mc1/ce_count", "3")
    play.counts("dra_numa_hardware_faults")
    play.sees("/v1/machine.errors[].corrected")
    for kind in ("ce", "ue"):
        machine.write(play.machine.root / f"sys/devices/system/edac/cpu/cpu1/{kind}_count", "0")
    play.sees("/v1/machine.errors[].cpus")
    machine.write(play.machine.root / "sys/devices/system/edac/mc/mc1/ce_count", "nonsense")
    play.warns(StatusCode.ERRORS_UNREADABLE)
    machine.write(play.machine.root / "sys/devices/system/edac/mc/mc1/ce_count", "3")
    play.sees("/v1/devices[].taints")
    for size in ("2MB", "1GB"):
        machine.write(pods / f"hugetlb.{size}.numa_stat", "total=0 N0=0 N1=0")
    machine.set_pages(1, 2048, 2048 - 64)
    play.counts("dra_numa_hugepages_held_by_host")
    online = machine.root / "sys/devices/system/cpu/online"
    text = online.read_text()
    machine.write(online, "nonsense")
    play.counts("dra_numa_machine_readable", 0)
    play.counts("dra_numa_discovery_failures_total")
    play.fails(BackendCode.HOST_UNREADABLE)
    machine.write(online, text.strip())


def drift(play: Play) -> None:
    """Another program overwrites a container's cpuset."""
    with play.pod("db", memory(64 * MIB)) as pod:
        box = pod.run()
        (box.directory / "cpuset.mems").write_text("0-1\n")
        play.counts("dra_numa_backend_repairs_total")


def slow_kernel(play: Play) -> None:
    """A write to a cgroup hangs while a container is being started: the hook is late and returns an error."""
    with play.pod("late", cpus(2)) as pod:
        pod.run_sandbox()
        exclusive = play.stage.paths.cgroup_root / pod.sandbox["cgroup_parent"].lstrip("/") / "cpuset.cpus.exclusive"
        exclusive.unlink()
        os.mkfifo(exclusive)
        with pytest.raises(AnsweredError):
            pod.run()
        play.counts("dra_numa_backend_hooks_total", outcome="timeout")
        play.fails(BackendCode.KERNEL_CALL_HANGS)
        # When the other end of the FIFO is opened, the hung write returns.
        os.close(os.open(exclusive, os.O_RDWR))


def everything_claimed(play: Play) -> None:
    """Claims hold all unreserved CPUs except one, which stays in the shared pool."""
    with play.pod("left", cpus(16, numa_node=1)), play.pod("right", cpus(13, numa_node=0)) as pod:
        pod.run()
        play.until("one CPU", lambda: any(value < 2 for _, value in play.witness.samples["dra_cpu_available_cpus"]))


def moved(play: Play) -> None:
    """With ``cpuExclusivity: pool``, other containers are moved off the claimed CPUs."""
    with StagePod(play.stage, "web") as web:
        web.run()
        with play.pod("db", cpus(2)) as pod:
            pod.run()
            play.counts("dra_numa_backend_mover_duration_seconds_count")


@contextmanager
def unwritable(path: Path, text: str) -> Iterator[None]:
    """Replaces a cgroup file with one that can be read but not written, not even by root."""
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    try:
        os.write(sealed, f"{text}\n".encode())
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        new = path.with_name("sealed")
        new.symlink_to(f"/proc/{os.getpid()}/fd/{sealed}")
        new.replace(path)
        yield
    finally:
        HostDirectory.write(path, text)
        os.close(sealed)


def unrepaired(play: Play) -> None:
    """Another program's values stay in cgroups because the kernel rejects the audit's writes."""
    with play.pod("db", cpus(2, numa_node=1), memory(64 * MIB, numa_node=1)) as pod:
        box = pod.run()
        with unwritable(box.directory / "cpuset.mems", "0-1"):
            play.reads("NUMANodesDiffer")
            play.fails(BackendCode.OPERATION_NOT_PERMITTED)
        with unwritable(box.directory / "cpuset.cpus", "8-31"):
            play.reads("CPUsDiffer")
    with StagePod(play.stage, "web") as web, play.pod("late", cpus(2)) as pod:
        plain = web.run()
        pod.run()
        with unwritable(plain.directory / "cpuset.cpus", "0-31"):
            play.reads("NotExclusive")


def no_partitions(play: Play) -> None:
    """The configuration allows partitions, but the node's kernel does not support them."""
    play.counts("dra_numa_backend_exclusivity", mode="pool", configured="auto")
    play.sees("/v1/status.warnings[].cause")
    play.hears("PartitionsUnavailable")


def observing(play: Play) -> None:
    """The driver only observes: it would otherwise change the cgroups of the pod that is running."""
    with StagePod(play.stage, "web") as pod:
        pod.run()
        play.warns(StatusCode.OBSERVE_MODE)
        play.warns(StatusCode.SETTING_RENAMED)
        play.counts("dra_numa_backend_enforcement", mode="observe")
        play.counts("dra_numa_backend_observed_changes")
        play.counts("dra_numa_backend_observed_cgroup_files")
        play.sees("/v1/backend.status.observation.changes[].cgroup")


def refused_claim(play: Play) -> None:
    """A claim asks for a partition on a node that does not support them."""
    with play.pod("isolated", cpus(2), isolation="isolated") as pod:
        with pytest.raises(AnsweredError):
            pod.run()
        play.reads("ContainerRefused")
        play.reads("Prepared")


def status_writes(play: Play) -> None:
    """The API server denies writes to claim statuses."""
    fault = {"count": 50, "answer": "403", "verb": "patch", "resource": "resourceclaims"}
    play.stage.api("/fake", "POST", {"fail_next": fault})
    with play.pod("denied", cpus(1)):
        play.counts("dra_numa_claim_status_writes_total", result="denied")
    play.stage.api("/fake", "POST", {"no_faults": True})


def outages(play: Play) -> None:
    """The runtime, the backend and the frontend stop one after another, while the node has a prepared claim."""
    play.pod("kept", cpus(1))
    instance, standby = play.stage.instances[0], play.stage.add_instance()
    play.counts("dra_numa_backend_active", 0)
    for process in standby.processes:
        process.stop()
    play.stage.stand_ins[2].kill()
    play.counts("dra_numa_backend_synchronized", 0)
    play.sees("/v1/backend.status.enforced", default=True)
    instance.backend.kill()
    play.counts("dra_numa_backend_live", 0)
    play.sees("/v1/backend.problem")
    play.reads("NoBackend")
    play.fails(StatusCode.BACKEND_SILENT)
    instance.frontend.kill()
    play.until("silence", lambda: play.witness.record_vanished_metrics(play.stage))


def nothing_offered(play: Play) -> None:
    """The configuration reserves a CPU that does not exist, and the Node lists no allocatable resources."""
    play.fails(StatusCode.NOTHING_OFFERED)
    play.warns(StatusCode.KUBELET_RESERVE_UNKNOWN)


def gate_off(play: Play) -> None:
    """DRAConsumableCapacity is off, so nothing is published."""
    play.counts("dra_numa_slices_in_sync", 0)
    play.hears("FeatureGateMissing")


def slices_denied(play: Play) -> None:
    """The API server denies writes to slices, so the update after the machine has changed fails."""
    play.hears("ResourceSlicesNotPublished")


def older_server(play: Play) -> None:
    """The API server does not know fields that the configuration needs."""
    play.hears("ResourceSliceListsRefused")
    play.machine.set_errors(1, "Skylake Socket#1 IMC#0", "CPU_SrcID#1_MC#0_Chan#0_DIMM#0", ue=1)
    play.hears("ResourceSliceFieldsDropped")


def no_conditions(play: Play) -> None:
    """The API server drops binding conditions, which hugepages on demand require."""
    play.hears("BindingConditionsUnsupported")
    play.warns(StatusCode.CONDITIONS_DROPPED)


def older_kubelet(play: Play) -> None:
    """The API server supports counting claims against the Node's allocatable resources, but the kubelet does not."""
    play.hears("NodeAllocatableMappingUnsupported")


def counted(play: Play) -> None:
    """A 1.37 kubelet counts claims against the Node's allocatable resources."""
    with play.pod("db", cpus(2)):
        play.sees("/v1/claims[].counted")


def joined(play: Play) -> None:
    """A claim combines memory with CPUs from a device that spans two NUMA nodes."""
    with play.pod("db", cpus(2), memory(64 * MIB, numa_node=1)):
        play.sees("/v1/claims[].cpus[].joined", [])


_PARAMETERS: dict[str, Any] = {
    "strategy": "spread",
    "fullPhysicalCores": True,
    "l3": "ignore",
    "numa": "distribute",
    "isolcpus": "never",
    "coreType": "efficiency",
    "quota": "keep",
    "irqs": "keep",
    "sharing": "pod",
    "cpuset": "12-13",
}
"""A non-default value for each CPU parameter; isolation and poolCPUs have their own scenarios."""
_MEMORY_PARAMETERS: tuple[dict[str, Any], ...] = (
    {"binding": "preferred"},
    {"limit": "claim"},
    {"protect": "low"},
    {"high": 0.9},
    {"mount": {"path": "/pages", "mode": "1777"}},
)
Scenario = Callable[[Play], None]
_MAPPED = {"publishNodeAllocatableResourceMapping": True}
_ON_DEMAND = {"hugepagesOnDemand": [{"numaNode": 0, "size": "2Mi", "pages": 4096}]}
_COUNTING = {"kubernetes": "1.37", "gates_on": ("DRANodeAllocatableResources",), "config": _MAPPED}
_KERNEL = f"{OUR_BACKEND} --kernel-root={{host_root}}"
STAGES: tuple[tuple[dict[str, Any], bool, tuple[Scenario, ...]], ...] = (
    (
        {"partitions": True, "reserved_cpus": "0,16", "backend": _KERNEL},
        True,
        (
            *(
                parameters,
                running,
                refused_partition,
                authors,
                static_managers,
                released_in_use,
                damaged_files,
                files_in_the_way,
            ),
            *(everything_claimed, drift, status_writes, machine_changes, slow_kernel, outages),
        ),
    ),
    ({"config": {"cpuExclusivity": "pool"}}, True, (moved, unrepaired, refused_claim)),
    ({"reserved_cpus": "0", "config": {"enforcement": "observe", "irqs": "leave"}}, True, (observing,)),
    ({"gates_off": ("DRAConsumableCapacity",)}, False, (gate_off,)),
    ({"reserved_cpus": "99"}, False, (nothing_offered,)),
    ({"gates_off": ("DRADeviceTaints",), "config": {"exposePCIeRoots": True}}, True, (older_server, no_partitions)),
    (_COUNTING, True, (counted,)),
    (_COUNTING, False, (older_kubelet,)),
    ({}, False, (slices_denied,)),
    ({"gates_off": ("DRADeviceBindingConditions",), "config": _ON_DEMAND}, True, (no_conditions,)),
    ({"gates_on": ("DRAListTypeAttributes",), "config": {"groupBy": "machine"}}, True, (joined,)),
)
"""For each stage: its settings, whether its instance becomes ready, and the scenarios that run on it."""


def deny_slices(stage: Stage) -> None:
    """The API server denies requests to create slices."""
    fault = {"count": 500, "answer": "403", "verb": "create", "resource": "resourceslices"}
    stage.api("/fake", "POST", {"fail_next": fault})


def declare_nothing(stage: Stage) -> None:
    """The kubelet does not declare the feature that counts claims against the Node's allocatable resources."""
    path = f"/api/v1/nodes/{stage.settings.node}"
    node = stage.api(path)
    node["status"]["declaredFeatures"] = []
    stage.api(f"{path}/status", "PUT", node)


def reserve_nothing(stage: Stage) -> None:
    """The Node lists no allocatable resources."""
    path = f"/api/v1/nodes/{stage.settings.node}"
    node = stage.api(path)
    node["status"]["allocatable"] = {}
    stage.api(f"{path}/status", "PUT", node)


BEFORE: dict[Scenario, Callable[[Stage], None]] = {
    slices_denied: deny_slices,
    older_kubelet: declare_nothing,
    nothing_offered: reserve_nothing,
}
"""For a scenario, a function that changes the cluster before the driver starts on the scenario's stage."""


def a_machine(root: Path) -> HostDirectory:
    """Returns a machine with two NUMA nodes of 16 CPUs each, an isolated CPU, an interrupt, hugepages and memory
    whose bandwidth and latency are listed in sysfs.
    """
    machine = HostDirectory(write_tree(captured("32intel64-2p8co2t+8ve"), root))
    for node in (0, 1):
        machine.set_pages(node, 2048, 2048)
    machine.write(root / "sys/devices/system/cpu/isolated", "31")
    for path, text in {
        "proc/irq/default_smp_affinity": "ffffffff",
        "proc/irq/40/smp_affinity_list": "0-31",
        "proc/irq/40/effective_affinity_list": "2",
        "proc/irq/40/eth0/x": "",
        "sys/devices/virtual/workqueue/cpumask": "ffffffff",
        "sys/devices/system/cpu/possible": "0-31",
        "sys/devices/cpu_core/cpus": "0-14,16-30",
        "sys/devices/cpu_atom/cpus": "15,31",
        "sys/devices/system/node/node1/access1/initiators/node1": "",
        "sys/devices/system/node/node1/access1/initiators/read_bandwidth": "200000",
        "sys/devices/system/node/node1/access1/initiators/read_latency": "90",
        "sys/devices/virtual/memory_tiering/memory_tier4/nodelist": "0-1",
    }.items():
        machine.write(root / path, text)
    return machine


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Witness, dict[str, str]]:
    """Returns everything that was observed in all scenarios, and the scenarios that failed."""
    witness, failures = Witness(DOCUMENTS), dict[str, str]()
    for settings, ready, scenarios in STAGES:
        machine = a_machine(tmp_path_factory.mktemp("machine"))
        with Stage(StageSettings(host_root=machine.root, **settings)) as stage:
            for scenario in scenarios:
                if before := BEFORE.get(scenario):
                    before(stage)
            (stage.add_ready_instance if ready else stage.add_instance)()
            for scenario in scenarios:
                try:
                    scenario(Play(stage, machine, witness))
                except Exception as error:  # noqa: BLE001 - the others go on
                    failures[scenario.__name__] = f"{type(error).__name__}: {error}"[:3000]
            print(stage.logs())
    return witness, failures


# --- All documented entries, by source. ---


_MODELS: dict[str, type[BaseModel]] = {
    "/v1/machine": MachineDocument,
    "/v1/devices[]": DeviceDocument,
    "/v1/claims[]": AllocationRecord,
    "/v1/cpus[]": CpuDocument,
    "/v1/memory[]": MemoryDocument,
    "/v1/containers[]": ContainerReport,
    "/v1/backend": BackendDocument,
    "/v1/status": StatusDocument,
    "/v1/version": VersionDocument,
    "/v1/node": NodeDocument,
}


def documented_fields() -> dict[str, Any]:
    """Returns the fields of the documents that are contract models, with their defaults."""
    found: dict[str, Any] = {}
    for path, model in _MODELS.items():
        found |= dict(fields_of(model, path))
    # Metrics have their own test. ``version`` and a warning's ``unready`` never change: a format's version is constant
    # in a release, and no warning makes a pod unready.
    left_out = re.compile(r"/v1/backend\.status\.metrics.*|.*\.version|/v1/status\.warnings\[\]\.unready")
    return {path: default for path, default in found.items() if not left_out.fullmatch(path)}


def documented_metrics() -> list[str]:
    """Returns the names in the tables in docs/metrics.md."""
    text = (ROOT / "docs/metrics.md").read_text()
    tables = text.partition("\n## dra-frontend\n")[2].partition("\n## Values of labels\n")[0]
    return re.findall(r"^\| `(dra_\w+)` \|", tables, re.MULTILINE)


def documented_reasons() -> list[str]:
    """Returns the reasons in the table in docs/events.md."""
    return re.findall(r"^\| `([A-Z]\w+)` \|", (ROOT / "docs/events.md").read_text(), re.MULTILINE)


def condition_reasons() -> list[str]:
    """Returns the condition reasons that are used in status.devices, taken from the calls to Condition in the module
    that creates the conditions.
    """
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(device_status))) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Condition"]
    return sorted({str(call.args[1].value) for call in made if isinstance(call.args[1], ast.Constant)})


def alerts() -> dict[str, str]:
    """Returns each alert's expression."""
    groups = yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


_SELECTOR = r"(dra_\w+)(\{[^}]*\})?(\[\w+\])?"
_OPERATORS = {"==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt}


def could_fire(expression: str, witness: Witness) -> bool:
    """Returns True if every comparison is true for at least one of the observed samples. For a rate, the counter must
    be above 0.
    """
    if "last_over_time" in expression:
        return witness.vanished
    if "histogram_quantile" in expression:
        ((name, *_),) = re.findall(_SELECTOR, expression)
        return slower(witness, name, float(expression.rpartition(">")[2]))
    compared = re.findall(rf"{_SELECTOR}\)*\s*(==|!=|>|<)\s*([\d.]+)", expression)
    return bool(compared) and all(
        any(
            (value > 0 if window else _OPERATORS[comparison](value, float(bound))) and _matches(its, labels)
            for its, value in witness.samples[name]
        )
        for name, labels, window, comparison, bound in compared
    )


def slower(witness: Witness, name: str, bound: float) -> bool:
    """Returns True if a histogram has counted observations above a bound."""
    most: dict[tuple[Any, bool], float] = {}
    for labels, value in witness.samples[name]:
        others = frozenset((key, text) for key, text in labels.items() if key != "le")
        if labels["le"] == "+Inf" or float(labels["le"]) == bound:
            key = others, labels["le"] == "+Inf"
            most[key] = max(most.get(key, 0.0), value)
    return any(value > most[others, False] for (others, every), value in most.items() if every)


def _matches(labels: Any, selector: str) -> bool:
    wanted = re.findall(r'(\w+)=(~?)"([^"]*)"', selector)
    return all(re.fullmatch(text if fuzzy else re.escape(text), labels.get(key, "")) for key, fuzzy, text in wanted)


Played = tuple[Witness, dict[str, str]]


def excused(key: str) -> bool:
    """Returns True if another test covers the entry."""
    return key in ELSEWHERE


def test_every_scenario_succeeds(played: Played) -> None:
    """A failing scenario does not affect the others; its name and the expected condition are reported here."""
    assert played[1] == {}


@pytest.mark.parametrize("reason", documented_reasons())
def test_every_documented_event_is_observed(played: Played, reason: str) -> None:
    """At least one scenario causes the Event from outside the driver."""
    assert reason in played[0].reasons or excused(reason)


def test_every_event_is_documented(played: Played) -> None:
    """Operators can look up each reason in docs/events.md."""
    assert played[0].reasons <= set(documented_reasons())


@pytest.mark.parametrize("reason", condition_reasons())
def test_every_condition_is_observed(played: Played, reason: str) -> None:
    """The reason appears in a device's status or in ``/v1/node``, and docs/workloads.md contains it."""
    assert reason in played[0].conditions or excused(reason)
    assert reason in (ROOT / "docs/workloads.md").read_text()


@pytest.mark.parametrize("name", documented_metrics())
def test_every_documented_metric_is_observed(played: Played, name: str) -> None:
    """The metric had a value other than 0 in at least one scenario."""
    assert played[0].counted(name.removesuffix("_total")) or excused(name)


def test_every_metric_is_documented(played: Played) -> None:
    """The metrics in the registry are the same as those in docs/metrics.md."""
    assert played[0].families == {name.removesuffix("_total") for name in documented_metrics()}


@pytest.mark.parametrize("alert", alerts())
def test_every_alert_can_fire(played: Played, alert: str) -> None:
    """Samples were observed that make the alert's expression true."""
    assert could_fire(alerts()[alert], played[0]) or excused(alert), alerts()[alert]


@pytest.mark.parametrize("path", documented_fields())
def test_every_documented_field_is_observed(played: Played, path: str) -> None:
    """The field had a value other than its default in at least one scenario."""
    assert played[0].differs(path, documented_fields()[path]) or excused(path), played[0].describe(path)


@pytest.mark.parametrize("code", [*StatusCode, *BackendCode])
def test_every_status_code_is_observed(played: Played, code: StatusCode | BackendCode) -> None:
    """In some scenario, a problem or a warning has this code, or has a cause with this code."""
    kinds, fields = ("problems", "warnings"), ("code", "cause")
    found = [played[0].values[f"/v1/status.{kind}[].{field}"] for kind in kinds for field in fields]
    assert any(code in codes for codes in found) or excused(code)


@pytest.mark.parametrize("address", sorted({*ELSEWHERE.values()}))
def test_every_test_listed_in_elsewhere_exists(address: str) -> None:
    """Fails if a test in ELSEWHERE is renamed or deleted."""
    path, _, name = address.partition("::")
    assert re.search(rf"def {name}\(", (ROOT / path).read_text())
