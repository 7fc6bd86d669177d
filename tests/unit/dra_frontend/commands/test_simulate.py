# SPDX-License-Identifier: Apache-2.0
"""What-if through the real allocator."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.commands import cli
from dra_frontend.commands.simulate import NODE, read_operations, simulate
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.quantity import parse_quantity
from dra_frontend.machine.model import Machine
from numa_contract.config import Config, ConfigError
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.trees import small_machine, write_tree
from tests.strategies.machines import machine


def prepare(uid: str, *requests: dict[str, Any]) -> dict[str, Any]:
    """An operation of the input file."""
    return {"prepare": {"uid": uid, "requests": list(requests)}}


def request(device: str, cpus: Any = None, **more: Any) -> dict[str, Any]:
    """A request of the input file."""
    return {"device": device, **({} if cpus is None else {"cpus": cpus}), **more}


def ran(*operations: dict[str, Any], found: Machine | None = None, **config: Any) -> dict[str, Any]:
    """Runs operations on an even machine: two NUMA nodes with two cores of two threads each."""
    settings = Config(**config)
    inventory = build_inventory(found or machine(), settings, NODE)
    return simulate(inventory, read_operations({"operations": list(operations)}, "claims.yaml"), settings)


def test_one_entry_for_each_operation_and_the_pool_at_the_end() -> None:
    """Prepare, one that does not fit, unprepare: the CPUs come back. The same claim again has the same CPUs."""
    assert ran(
        prepare("a", request("cpudevnuma000", 3)),
        prepare("b", request("cpudevnuma000", 2)),
        prepare("c", request("cpudevnuma001", 2)),
        {"unprepare": {"uid": "a"}},
        {"unprepare": {"uid": "never"}},
        prepare("b", request("cpudevnuma000", 2)),
        prepare("b", request("cpudevnuma000", 2)),
    ) == {
        "operations": [
            {"uid": "a", "cpus": "0-1,4", "perRequest": {"request-0": "0-1,4"}},
            {
                "uid": "b",
                "error": "claim simulated/b: request request-0: device cpudevnuma000: 2 CPUs wanted, 1 free (5); "
                "CPUs of a claim that is being released come back when its last container has ended",
            },
            {"uid": "c", "cpus": "3,7", "perRequest": {"request-0": "3,7"}},
            {"uid": "a"},
            {"uid": "never"},
            *[{"uid": "b", "cpus": "0,4", "perRequest": {"request-0": "0,4"}}] * 2,
        ],
        "pool": "1-2,5-6",
    }


def test_requests_have_their_own_cpus_names_and_parameters() -> None:
    """Parameters may be whole or only the fields of cpuConfig."""
    spread = {"apiVersion": "v1alpha1", "cpuConfig": {"strategy": "spread"}}
    (first,) = ran(
        prepare(
            "a",
            request("cpudevnuma001", 2, parameters=spread, name="work"),
            request("cpudevnuma000", 2, parameters={"strategy": "spread"}),
            request("cpudevnuma000"),
        ),
        reserved_cpus=frozenset({7}),
    )["operations"]
    assert first == {"uid": "a", "cpus": "0-4", "perRequest": {"work": "2-3", "request-1": "0-1", "request-2": "4"}}


def test_every_mode_can_be_simulated() -> None:
    """Named CPUs in machine mode, single CPUs in individual mode."""
    named = request("cpudevmachine", 2, parameters={"cpuset": "2-3"})
    assert ran(prepare("a", named), group_by="machine")["operations"][0]["cpus"] == "2-3"
    outcome = ran(
        prepare("a", request("cpudev002", name="r"), request("cpudev005", 1, name="r")),
        prepare("b", request("cpudev002")),
        prepare("c", request("cpudev001", 2)),
        cpu_device_mode="individual",
    )["operations"]
    assert outcome[0] == {"uid": "a", "cpus": "2,5", "perRequest": {"r": "2,5"}}
    assert "CPU 2 is held by claim a" in outcome[1]["error"]
    assert outcome[2]["error"] == "device cpudev001 is one CPU, 2 are requested"


@pytest.mark.parametrize(
    ("amount", "given"),
    [(1, 1), ("1", 1), (1.0, 1), ("1000m", 1), (0.5, 1), (1.5, 2), ("1500m", 2), ("2001m", 3), (None, 1)],
)
def test_a_fraction_is_rounded_up_as_the_scheduler_does(amount: Any, given: int) -> None:
    """By the device's request policy: at least one CPU, then whole ones. A single CPU is one however it is written."""
    (first,) = ran(prepare("a", request("cpudevnuma000", amount)))["operations"]
    assert len(parse_cpu_list(first["cpus"])) == given
    (single,) = ran(prepare("a", request("cpudev002", amount)), cpu_device_mode="individual")["operations"]
    assert ("2" if amount is None or parse_quantity(amount) == 1 else None) == single.get("cpus")


def test_the_pool_is_never_empty() -> None:
    """Where every other CPU is claimed, the rest share the reserved ones."""
    claimed = prepare("a", request("cpudevnuma000", 3), request("cpudevnuma001", 4))
    assert ran(claimed, reserved_cpus=frozenset({0}))["pool"] == "0"


@pytest.mark.parametrize("amount", [0, -1, -0.5, 4.5])
def test_an_amount_that_the_scheduler_would_not_give_is_an_outcome(amount: Any) -> None:
    """It is refused as prepare refuses it."""
    (first,) = ran(prepare("a", request("cpudevnuma000", amount)))["operations"]
    assert "request-0" in first["error"]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (None, "claims.yaml: "),
        ({"operations": [{}]}, "operations.0: must have exactly one of prepare and unprepare"),
        ({"operations": [prepare("a", request("d", gold=1))]}, "operations.0.prepare.requests.0.gold: unknown key"),
        ({"operations": [{"unprepare": {"uid": 7}}]}, "operations.0.unprepare.uid: Input should be a valid string"),
        ({"operations": [{"unprepare": {"uid": "../x"}}]}, "operations.0.unprepare.uid: UID '../x'"),
        ({"operations": [prepare("b", request("d")), prepare("a")]}, "operations.1.prepare.requests: List should have"),
        ({"operations": [prepare("a", request("d", True))]}, "requests.0.cpus: must be a quantity"),
        ({"operations": [prepare("a", request("d", "many"))]}, "requests.0.cpus: quantity 'many'"),
        ({"operations": [prepare("a", request(""))]}, "requests.0.device: String should have at least 1 character"),
    ],
)
def test_a_bad_file_is_refused_by_name(document: Any, text: str) -> None:
    """Every fault with its place."""
    with pytest.raises(ConfigError) as caught:
        read_operations(document, "claims.yaml")
    assert text in str(caught.value)


@pytest.fixture
def host(tmp_path: Path) -> str:
    """A host root with the small machine: CPUs 0-3 on node 0, 4-7 on node 1."""
    return str(write_tree(small_machine(), tmp_path / "host"))


def test_from_files(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints JSON on standard output; a refused operation is no failure of the command."""
    claims, config = tmp_path / "claims.yaml", tmp_path / "config.yaml"
    operations = [prepare("a", request("cpudevsocket001", 2)), prepare("b", request("cpudevnuma000"))]
    claims.write_text(yaml.safe_dump({"operations": operations}))
    config.write_text('groupBy: socket\nreservedCPUs: "4"\n')
    arguments = ["simulate", "--host-root", host, "--config", str(config), "--claims", str(claims), "-o", "json"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    document = json.loads(printed.out)
    assert document["operations"][0] == {"uid": "a", "cpus": "6-7", "perRequest": {"request-0": "6-7"}}
    assert "no CPU device simulated/cpudevnuma000" in document["operations"][1]["error"]
    assert document["pool"] == "0-3,5"


def test_bad_files_end_with_2(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error names the file, one that is missing, too."""
    claims = tmp_path / "claims.yaml"
    for text in (None, "operations: [", "operations: 3", "a: 1\na: 2"):
        if text is not None:
            claims.write_text(text)
        assert cli.main(["simulate", "--host-root", host, "--claims", str(claims)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"dra-frontend: {claims}: ")
        assert printed.err.count("\n") == 1
