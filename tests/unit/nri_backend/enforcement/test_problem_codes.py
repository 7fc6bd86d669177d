# SPDX-License-Identifier: Apache-2.0
"""The codes that the report gives for containers and problems, tested with the conditions that actually cause them."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.containers.admission import check_enforced, check_possible, occupied_rejection, outside_rejection
from nri_backend.containers.container import tracked_as
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.partitions import make_partition
from nri_backend.node.heartbeat import Leadership
from nri_backend.node.model import Host
from nri_backend.nri.model import LinkStatus, RejectedError
from nri_backend.problems import Problem
from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.builders import cpu_record, env_of, files_of
from tests.rigs.containers import POD, config, container, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.partition_tree import PartitionTree

ONE = cpu_record("c1", "cpus=2-3")


def codes(node: Node) -> set[BackendCode | None]:
    """Returns the codes of the instance's problems."""
    return {problem.code for problem in node.enforcer.problems}


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, BackendCode.PERMISSION_DENIED),
        (errno.EPERM, BackendCode.OPERATION_NOT_PERMITTED),
        (errno.EROFS, BackendCode.READ_ONLY_FILE_SYSTEM),
        (errno.EBUSY, BackendCode.CGROUP_FILE_REFUSED),
    ],
)
async def test_a_cpuset_write_that_the_kernel_denies_has_the_code_of_the_error(
    node: Node, number: int, code: BackendCode
) -> None:
    """If a claim container is being started, it is rejected with the code. If it is already running, a problem with the
    code is reported for the node.
    """
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    node.kernel.set(path, "cpuset.cpus", "0-7")
    node.kernel.refused[path, "cpuset.cpus"] = number
    with pytest.raises(RejectedError, match="cpuset"):
        await node.enforcer.start_container(pod(), stored)
    assert (node.reports["claim"].refused_code, "cpuset.cpus" in node.reports["claim"].refused) == (code, True)
    running = await node.run("running", *node.claim(cpu_record("c2", "cpus=4-5", pods=("p2",))), of="p2")
    node.kernel.refused[running, "cpuset.cpus"] = number
    node.kernel.set(running, "cpuset.cpus", "0-7")
    await node.until(lambda: code in codes(node))
    assert node.reports["running"].refused_code == ""


async def test_a_write_without_effect_has_the_code_for_settings_that_were_not_applied(node: Node) -> None:
    """The kernel returns no error, so there is no error-specific code."""
    path = await node.run("claim", *node.claim(ONE))
    above = path.rpartition("/")[0]
    node.kernel.set(above, "cpuset.cpus", "0-1,4-7")
    await node.until(lambda: BackendCode.SETTINGS_NOT_APPLIED in codes(node))


class AnsweringTree(PartitionTree):
    """A kernel that reports each partition as invalid and gives a reason."""

    answer = ""

    def _fault(self, path: str) -> str:
        return self.answer or super()._fault(path)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Enable partition not permitted", BackendCode.SYS_ADMIN_MISSING),
        ("Parent is not a partition root", BackendCode.PARTITION_REFUSED),
    ],
)
async def test_a_claim_enforced_by_the_pool_has_the_code_of_the_kernels_answer(
    tmp_path: Path, answer: str, code: BackendCode
) -> None:
    """The standby reads the message and the code from the enforcement record."""
    async with enforcing(Node(tmp_path, tree=AnsweringTree)) as node:
        assert isinstance(node.kernel, AnsweringTree)
        node.kernel.answer = answer
        await node.run("db", *node.claim(ONE))
        report = node.reports["db"]
        assert (report.fallback_code, answer in report.fallback_reason) == (code, True)
        tracked = node.enforcer.state.containers.get("db")
        assert tracked is not None
        stored = await node.enforcer.reconciler.recorder.recorded_fallback(tracked)
        assert (stored, stored.code) == (report.fallback_reason, code)


async def test_a_partition_without_its_controller_has_the_code_for_the_missing_file(tmp_path: Path) -> None:
    """The parent cgroup has no cpuset files."""
    tree = PartitionTree(tmp_path / "cgroup")
    tree.make(POD, cpuset=False)
    reason = make_partition(tree, POD, "root", parse_cpu_list("2-3"))
    assert (reason.code, "controller is not in" in reason) == (BackendCode.CONTROLLER_MISSING, True)


HOST = Host(parse_cpu_list("0-7"), ())
NO_PARTITIONS = replace(HOST, obstacle=Problem("boot Linux 6.7", BackendCode.KERNEL_TOO_OLD))


@pytest.mark.parametrize(
    ("host", "exclusivity", "code"),
    [
        (NO_PARTITIONS, "partition", BackendCode.KERNEL_TOO_OLD),
        (replace(HOST, online=parse_cpu_list("0-1")), "auto", BackendCode.CLAIMED_CPUS_OFFLINE),
    ],
)
def test_a_claim_that_the_node_cannot_enforce_has_the_code_of_the_nodes_reason(
    host: Host, exclusivity: str, code: BackendCode
) -> None:
    """The rejection of the required partition gives the reason why the node creates no partitions."""
    state = NodeState(config("0", exclusivity=exclusivity))  # type: ignore[arg-type]
    state.set_host(host)
    state.set_claim_files(files_of(ONE))
    tracked = state.authorized(tracked_as(pod(), container("c", *env_of(ONE))))
    rejection = check_possible(tracked, state, LinkStatus())
    assert rejection is not None
    assert rejection.problem().code is code


def test_rejections_without_another_problem_have_their_reasons_code() -> None:
    """Covers an empty shared pool, other containers on the CPUs, a sandbox, and the lack of an active instance."""
    state = NodeState(config(""))
    state.set_host(replace(HOST, online=parse_cpu_list("2-3")))
    state.set_claim_files(files_of(ONE))
    claimed = state.authorized(tracked_as(pod(), container("c", *env_of(ONE))))
    plain = state.authorized(tracked_as(pod("p2"), container("d", of="p2")))
    stuck = replace(plain, observed=replace(plain.observed, failure=Problem("no", BackendCode.PERMISSION_DENIED)))
    found = (
        check_possible(plain, state, LinkStatus()),
        occupied_rejection(claimed, [plain]),
        occupied_rejection(claimed, [plain, stuck]),
        outside_rejection(claimed),
        check_enforced(claimed, None, Leadership(fresh=False, first=True), state, starting=True),
    )
    assert [one.problem().code if one else None for one in found] == [
        BackendCode.NO_SHARED_CPUS,
        BackendCode.CLAIMED_CPUS_OCCUPIED,
        BackendCode.PERMISSION_DENIED,
        BackendCode.CLAIM_UNSUPPORTED,
        BackendCode.NOT_ENFORCED,
    ]


async def test_malformed_variables_have_a_code(node: Node) -> None:
    """The pod's author wrote these variables."""
    with pytest.raises(RejectedError):
        await node.create("odd", "DRA_CPUSET_=0-3")
    assert node.reports["odd"].refused_code == BackendCode.VARIABLES_MALFORMED
