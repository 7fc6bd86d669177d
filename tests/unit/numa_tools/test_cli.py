# SPDX-License-Identifier: Apache-2.0
"""The command line as a user sees it."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from dra_frontend.machine.discovery import discover
from numa_contract import __version__
from numa_node.config_file import DEPRECATED_FLAGS
from numa_tools import cli
from numa_tools.commands.inspect import machine_table, report

from tests.rigs.trees import NAMES, captured, expected, small_machine, write_tree


@pytest.fixture
def host(tmp_path: Path) -> str:
    """Returns a host root with the small machine."""
    return str(write_tree(small_machine(), tmp_path / "host"))


def test_inspect_agrees_with_hwloc_when_reading_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a captured machine, ``inspect -o json`` prints the same values as hwloc, in well under two seconds. Without
    -o, it prints a table.
    """
    name = NAMES[0]
    root = write_tree(captured(name), tmp_path)
    started = time.process_time()
    assert cli.main(["inspect", "--host-root", str(root), "-o", "json"]) == 0
    assert time.process_time() - started < 2
    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in expected(name)} == expected(name)
    assert cli.main(["inspect"]) == 0
    assert capsys.readouterr().out.startswith("CPUs: ")


def test_slices_prints_a_list_in_json_and_yaml(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The slices that the service would publish are printed as one List, with the same content in both formats, and
    only on standard output.
    """
    printed = []
    for form in ("json", "yaml"):
        assert cli.main(["slices", "--host-root", host, "--node", "n", "-o", form]) == 0
        printed.append(capsys.readouterr())
    document = json.loads(printed[0].out)
    assert yaml.safe_load(printed[1].out) == document
    assert (document["apiVersion"], document["kind"]) == ("v1", "List")
    pools = [item["spec"]["pool"]["name"] for item in document["items"]]
    assert pools == ["n", "n-memory", "n-hugepages-2m", "n-hugepages-1g"]
    assert [streams.err for streams in printed] == ["", ""]


def test_slices_obeys_the_configuration_file_and_flags(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reserves from the configuration file apply, a flag overrides the file, and flags may precede the command."""
    (tmp_path / "config.yaml").write_text('reservedCPUs: "0-3"\n')
    arguments = ["--config", str(tmp_path / "config.yaml"), "slices", "--host-root", host, "-o", "json"]
    for flags, devices in (([], 1), (["--reserved-cpus", "0"], 2)):
        assert cli.main([*flags, *arguments]) == 0
        assert len(json.loads(capsys.readouterr().out)["items"][0]["spec"]["devices"]) == devices


@pytest.mark.parametrize(("spelling", "shown"), [("=true", True), ("=F", False), ("=1", True)])
def test_dra_driver_cpus_pcie_root_flag_is_accepted(
    spelling: str, shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--expose-pcie-roots=BOOL``, with any of Go's boolean spellings, overrides the file."""
    affinity = {"/sys/devices/pci10000:e0/pci_bus/10000:e0/cpulistaffinity": "0-7\n"}
    root = write_tree(small_machine().changed(affinity), tmp_path / "host")
    (tmp_path / "config.yaml").write_text(f"exposePCIeRoots: {str(not shown).lower()}\n")
    arguments = [f"--expose-pcie-roots{spelling}", "--config", str(tmp_path / "config.yaml")]
    assert cli.main([*arguments, "slices", "--node", "n", "--host-root", str(root), "-o", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)["items"][0]["spec"]["devices"][0]["attributes"]
    assert printed.get("resource.kubernetes.io/pcieRoot") == ({"strings": ["pci10000:e0"]} if shown else None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["slices", "--node", "Not_A_Node"], "node name: "),
        (["--reserved-cpus", "99", "slices", "--node", "n"], "reservedCPUs: CPU 99 does not exist"),
        (["--reserved-cpus", "x", "slices", "--node", "n"], "reservedCPUs"),
        (["slices", "--node", "n", "--config", "/nonexistent.yaml"], "/nonexistent.yaml"),
        (["inspect"], "/sys/devices/system/cpu/online: "),
    ],
)
def test_the_error_for_invalid_input_is_one_clear_line(
    host: str, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is on standard error, the exit code is 2, and there is no output. For a damaged tree, the line names the
    file and the root.
    """
    if arguments == ["inspect"]:
        Path(host, "sys/devices/system/cpu/online").write_text("0-3\n")
    assert cli.main([*arguments, "--host-root", host]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("dra-frontend: ")
    assert text in printed.err
    assert printed.err.endswith(f"(under {host})\n") == (arguments == ["inspect"])


def test_an_error_about_a_configuration_key_has_no_control_characters(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An archive may come from anywhere, so its keys must not send control sequences to the terminal."""
    (tmp_path / "config.yaml").write_text(json.dumps({"\x1b[2J": 1}))
    assert cli.main(["inspect", "--host-root", host, "--config", str(tmp_path / "config.yaml")]) == 2
    assert r"'\x1b[2J': unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["inspect", "-o", "xml"], ["explode"], ["inspect", "--nonsense"], ["--expose-pcie-roots=yes"]]
)
def test_a_usage_error_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """For unknown commands, flags and formats, a single line describes the error and refers to the help."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith("dra-frontend: ")
    assert re.search(r"; see dra-frontend( inspect)? --help$", printed.err.strip())


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_every_help_text_has_working_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each help text also lists the exit statuses."""
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    told = capsys.readouterr().out
    assert "\nExit status: 0" in told
    examples = re.findall(r"^  dra-frontend ([^|>\n]*)", told.partition("examples:\n")[2], re.MULTILINE)
    assert examples
    for example in examples:
        cli.build_parser().parse_args(shlex.split(example))


@pytest.mark.parametrize("command", [one for one, what in cli.COMMANDS.items() if "table" in what.outputs])
def test_every_table_has_the_same_formats(command: str) -> None:
    """Scripts and people can use the same values for ``-o`` everywhere."""
    assert cli.COMMANDS[command].outputs == ("table", "wide", "json", "yaml")


def test_wide_output_shows_memory_performance(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has two more columns, which are empty if the kernel reports no values."""
    tables = []
    for form in ("table", "wide"):
        assert cli.main(["inspect", "--host-root", host, "-o", form]) == 0
        tables.append(
            [line.split() for line in capsys.readouterr().out.splitlines() if re.match("NODE|[01] ", line)][:3]
        )
    assert [line[: len(short)] for line, short in zip(tables[1], tables[0], strict=True)] == tables[0]
    assert [line[len(short) :] for line, short in zip(tables[1], tables[0], strict=True)] == [
        ["BANDWIDTH", "MB/S", "LATENCY", "NS"],
        ["-", "-"],
        ["-", "-"],
    ]


def run(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """Runs a fresh interpreter."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=False, text=True, stderr=subprocess.PIPE, timeout=15, **options)  # type: ignore[call-overload, no-any-return] # options are of run()


def test_the_service_imports_the_command_line_but_no_tool() -> None:
    """The service runs on every node all the time, so it must not keep the tools in memory.
    tests/integration/test_service_imports.py checks a running service.
    """
    program = (
        "import sys, numa_tools.__main__, numa_tools.cli, dra_frontend.app\n"
        "print(*sorted(name for name in sys.modules if name.startswith('numa_tools')), 'tarfile' in sys.modules)\n"
    )
    ran = run("-c", program, stdout=subprocess.PIPE)
    assert (ran.returncode, ran.stdout.strip()) == (0, "numa_tools numa_tools.__main__ numa_tools.cli False")


def test_importing_the_service_runs_no_full_garbage_collection() -> None:
    """By default, the import would run about a dozen full garbage collections, each of which visits all objects. The
    event loop is not started in this test.
    """
    program = (
        "import asyncio, gc, sys; from numa_tools.__main__ import main\n"
        "asyncio.run = lambda coroutine: coroutine.close()\n"
        "before = gc.get_stats()[2]['collections']\n"
        "code = main()\n"
        "sys.exit(code or gc.get_stats()[2]['collections'] - before)\n"
    )
    ran = run("-c", program, "--node=n", "--log-level=error", stdout=subprocess.DEVNULL)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_inspect_and_slices_load_no_service_library(host: str) -> None:
    """Both commands start without gRPC, the Kubernetes client and the web server, which would cost a second and 60
    MB.
    """
    program = (
        "import sys; from numa_tools.cli import main\n"
        f"codes = [main([*command, '--host-root', {host!r}]) for command in (['inspect'], ['slices', '--node', 'n'])]\n"
        "heavy = {'grpc', 'google', 'kubernetes_asyncio', 'aiohttp', 'fastapi', 'uvicorn', 'prometheus_client'}\n"
        "heavy &= {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(f'{codes} {heavy}' if codes != [0, 0] or heavy else 0)\n"
    )
    ran = run("-c", program, stdout=subprocess.DEVNULL)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_full_disk_is_reported_without_traceback(host: str) -> None:
    """Output that cannot be written is reported as an error, with exit code 1."""
    with Path("/dev/full").open("w") as full:
        ran = run("-m", "numa_tools", "inspect", "--host-root", host, stdout=full)
    assert (ran.returncode, ran.stderr) == (1, "dra-frontend: No space left on device\n")


def test_a_reader_may_close_the_pipe_early(host: str) -> None:
    """``dra-frontend classes | head -1`` prints no error."""
    nobody, output = os.pipe()
    os.close(nobody)
    with os.fdopen(output, "w") as pipe:
        ran = run("-m", "numa_tools", "classes", "--host-root", host, stdout=pipe)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_inspect_reports_more_than_hwloc() -> None:
    """Free and surplus hugepages, distances, IDs, and offline and isolated CPUs are printed under separate keys."""
    found = report(discover(small_machine().changed({"/sys/devices/system/cpu/isolated": "3\n"})))
    more = {
        "isolcpus": [3],
        "offline": [],
        "hugepagesFree": {"0": {"2097152": 200, "1073741824": 0}, "1": {"2097152": 200, "1073741824": 1}},
        "hugepagesSurplus": {str(node): {"2097152": 0, "1073741824": 0} for node in range(2)},
        "distances": {"0": {"0": 10, "1": 21}, "1": {"0": 21, "1": 10}},
        "basePageBytes": 4096,
        "packageIds": [0, 1],
        "l3Ids": {"0": 0, "4": 1},
        "coreTypes": {"standard": list(range(8))},
        "smt": True,
        "memory": {
            str(node): {
                "kind": "dram",
                "bandwidthMBps": None,
                "latencyNanoseconds": None,
                "kernelTier": None,
                "nearestNumaNodes": [node],
            }
            for node in range(2)
        },
    }
    assert {key: found[key] for key in more} == more


def test_inspect_shows_reserves_and_their_origin(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reserves are listed per NUMA node, together with what remains for claims. As no cluster is queried, the
    default of a twentieth of each node's memory is reserved.
    """
    assert cli.main(["inspect", "--host-root", host]) == 0
    shown = capsys.readouterr().out.split("\n\n")
    assert shown[-2].splitlines() == [
        "Reserved CPUs:    none",
        (
            "Reserved memory:  1/20 of the memory of each NUMA node with CPUs, since the Node does not show what the "
            "kubelet reserves"
        ),
    ]
    assert shown[-1].splitlines() == [
        "NODE  MEMORY  HUGEPAGES  RESERVED  FOR CLAIMS",
        "0     4Gi     512Mi      256Mi     3.2Gi",
        "1     4Gi     1.5Gi      256Mi     2.2Gi",
    ]
    (tmp_path / "config.yaml").write_text("reservedMemory: [{numaNode: 1, limits: {memory: 1Gi}}]\n")
    assert cli.main(["inspect", "--host-root", host, "--config", str(tmp_path / "config.yaml"), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reserved"]["memory"]["source"] == "reservedMemory"
    assert found["reserved"]["memory"]["bytes"] == {"0": 0, "1": 1 << 30}
    assert found["claimableMemory"] == {"0": 7 << 29, "1": 3 << 29}


@pytest.mark.parametrize("command", [["inspect"], ["slices", "--node", "n"]])
@pytest.mark.parametrize(
    ("config", "code", "told"),
    [
        ('reservedCPUs: "0-500"', 2, "reservedCPUs: CPU 8-500 does not exist; possible CPUs: 0-7"),
        ("reservedMemory: [{numaNode: 7, limits: {memory: 1Gi}}]", 2, "reservedMemory: NUMA node 7 does not exist"),
        ('reservedCPUs: "0-7"', 0, "warning: reservedCPUs, withheldCPUs: no CPUs are left for claims"),
        (
            "reservedMemory: [{numaNode: 1, limits: {memory: 900Gi}}]",
            0,
            "warning: reservedMemory: no memory on NUMA node 1 is left for claims",
        ),
    ],
)
def test_all_commands_report_an_invalid_configuration_in_the_same_way(
    host: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    config: str,
    code: int,
    told: str,
) -> None:
    """An impossible configuration is an error, and one that leaves no resources for claims is a warning."""
    (tmp_path / "config.yaml").write_text(config)
    assert cli.main([*command, "--host-root", host, "--config", str(tmp_path / "config.yaml")]) == code
    printed = capsys.readouterr()
    assert told in printed.err
    assert bool(printed.out) == (code == 0)


def test_the_table_of_a_machine() -> None:
    """Each NUMA node has one aligned row, with everything that matters for placing a workload."""
    tree = small_machine().changed({"/sys/devices/system/cpu/isolated": "3\n"})
    assert machine_table(discover(tree)).splitlines() == [
        "CPUs:       8 online (0-7)",
        "Topology:   2 packages, 4 cores, SMT on",
        "isolcpus:   3",
        "Memory:     8Gi",
        "Base page:  4Ki",
        "",
        "NODE  CPUS  CORES  L3  MEMORY  KIND  NEAREST  2Mi FREE/TOTAL  1Gi FREE/TOTAL  DISTANCES",
        "0     0-3   2      1   4Gi     dram  0        200/256         0/0             0:10 1:21",
        "1     4-7   2      1   4Gi     dram  1        200/256         1/1             0:21 1:10",
    ]


def test_core_types_and_offline_cpus_are_shown_only_if_the_machine_has_any() -> None:
    """Core types and offline CPUs each have a line of their own. A node without CPUs or hugepages shows dashes."""
    node = "/sys/devices/system/node"
    tree = small_machine().changed(
        {
            "/sys/devices/cpu_core/cpus": "0-3\n",
            "/sys/devices/cpu_atom/cpus": "4-7\n",
            "/sys/devices/system/cpu/cpu8/online": "0\n",
            f"{node}/online": "0-2\n",
            f"{node}/node0/distance": "10 21 28\n",
            f"{node}/node1/distance": "21 10 28\n",
            f"{node}/node2/cpumap": "00\n",
            f"{node}/node2/meminfo": "Node 2 MemTotal: 1500000 kB\n",
        }
    )
    lines = machine_table(discover(tree)).splitlines()
    assert "Core types: p-core 0-3, e-core 4-7" in lines
    assert "Offline:    8" in lines
    assert lines[-1] == "2     -     0      0   1.4Gi   unknown  0-1      -               -               -"


def test_the_help_names_deprecated_flags_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """As in nri-backend, the help names the replacements, and the version can be printed with a command."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for flag, key in DEPRECATED_FLAGS.items():
        assert f"{flag} VALUE deprecated, use {key} in the configuration file" in told
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"dra-frontend {__version__}\n"


@pytest.mark.parametrize("arguments", [["status"], ["inspect"]])
def test_yaml_has_the_same_values_as_json(host: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The values are also the same for a node whose service is down, in which case the node's files are read."""
    printed = []
    for form, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        cli.main([*arguments, "--host-root", host, "-o", form])
        printed.append(read(capsys.readouterr().out))
    assert printed[0]
    assert printed[0] == printed[1]
