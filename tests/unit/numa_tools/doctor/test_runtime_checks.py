# SPDX-License-Identifier: Apache-2.0
"""Container runtime checks on complete nodes. A check is good only if the runtime's own rules or its output determine
the setting.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numa_node.runtimes.containerd import CRI_OF_1, NRI
from numa_tools import cli
from numa_tools.doctor.gather import gather
from numa_tools.doctor.model import Level
from numa_tools.doctor.table import Verdict, examine

from tests.fakes.containerd_dump import dump
from tests.rigs.containerd_files import toml_text
from tests.rigs.faulty_node import FaultyNode

PLAIN = "/etc/containerd/config.toml"
K3S = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
DOCKER = 'disabled_plugins = ["cri"]\n'
IMPORTS = 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
BOTH_ON = (
    f'[plugins."{NRI}"]\ndisable = false\n'
    f'[plugins."{CRI_OF_1}"]\nenable_cdi = true\ndisable_hugetlb_controller = false\n'
)
RUNTIME = ("settings", "nri-socket", "required-plugin")
NRI_OFF, CDI_OFF = "NRI is switched off", "CDI is switched off"


@pytest.fixture
def node() -> Iterator[FaultyNode]:
    """Returns a healthy node."""
    made = FaultyNode()
    yield made
    made.close()


async def verdicts(node: FaultyNode, **given: str) -> dict[str, Verdict]:
    """Returns the verdicts of the runtime checks, keyed by the last part of the check's ID."""
    async with node.up() as settings:
        facts = await gather(settings, **given)
    return {one.check.id.removeprefix("runtime."): one for one in examine(facts) if one.check.group == "runtime"}


def texts(found: dict[str, Verdict]) -> str:
    """Returns all messages that the checks print."""
    return " ".join(
        part for verdict in found.values() for one in verdict.findings for part in (one.what, one.why, one.remedy)
    )


def judged(found: dict[str, Verdict], fact: str) -> str:
    """Returns the settings check's result for one setting."""
    if any(fact in one.evidence for one in found["settings"].findings):
        return "problem"
    return "unknown" if any(one.level is Level.UNKNOWN for one in found["settings"].findings) else "good"


def runs(node: FaultyNode, version: str) -> None:
    """Has the kubelet report the given runtime, and removes the driver's drop-in."""
    node.node["nodeInfo"]["containerRuntimeVersion"] = version
    node.nri, node.cri = {}, {}


REGISTRY = f'version = 2\n[plugins."{CRI_OF_1}".registry]\nconfig_path = "/etc/containerd/certs.d"\n'
TIMEOUT = f'version = 2\n[plugins."{NRI}"]\nplugin_request_timeout = "5s"\n'


@pytest.mark.parametrize(
    ("drop_in", "version", "fact", "result"),
    [
        (REGISTRY, "containerd://1.7.27", CDI_OFF, "problem"),
        (REGISTRY, "containerd://2.1.4", CDI_OFF, "good"),
        (REGISTRY, "", CDI_OFF, "unknown"),
        (TIMEOUT, "containerd://1.7.27", NRI_OFF, "problem"),
        (TIMEOUT, "containerd://2.1.4", NRI_OFF, "good"),
        (TIMEOUT, "", NRI_OFF, "unknown"),
        (REGISTRY, "containerd://1.7.27", NRI_OFF, "good"),
        (REGISTRY, "containerd://1.6.30", NRI_OFF, "unknown"),
        (REGISTRY, "containerd://3.0.0", NRI_OFF, "unknown"),
    ],
)
async def test_a_drop_ins_effect_depends_on_the_release(
    drop_in: str, version: str, fact: str, result: str, node: FaultyNode
) -> None:
    """Release 1.7 replaces config.toml's whole section. If the release is unknown, settings that depend on it are
    unknown.
    """
    runs(node, version)
    node.host(PLAIN, IMPORTS + BOTH_ON)
    node.host("/etc/containerd/conf.d/10-other.toml", drop_in)
    found = await verdicts(node)
    assert judged(found, fact) == result
    if result == "unknown":
        assert "containerd config dump" in texts(found)


@pytest.mark.parametrize("version", ["containerd://2.1.4-k3s1", ""])
async def test_k3s_next_to_docker_uses_its_own_file(version: str, node: FaultyNode) -> None:
    """Docker's file disables CRI, whereas NRI and CDI are on with k3s's file."""
    runs(node, version)
    node.host(PLAIN, DOCKER)
    node.host(K3S, f'version = 3\n[plugins."{NRI}"]\ndisable = false\n')
    found = await verdicts(node)
    assert (judged(found, NRI_OFF), judged(found, CDI_OFF)) == ("good", "good")
    node.host(K3S, f'version = 3\n[plugins."{NRI}"]\ndisable = true\n')
    found = await verdicts(node)
    assert judged(found, NRI_OFF) == "problem"
    assert K3S in found["settings"].findings[0].what


@pytest.mark.parametrize("version", ["cri-o://1.34.0", ""])
@pytest.mark.parametrize("docker", [True, False])
async def test_cri_o_uses_its_own_files(version: str, docker: bool, node: FaultyNode) -> None:
    """On a node with CRI-O, no message mentions containerd, except the one about a missing drop-in."""
    runs(node, version)
    node.host(PLAIN, DOCKER)
    if not docker:
        (node.root / PLAIN[1:]).unlink()
    node.host("/etc/crio/crio.conf.d/10-nri.conf", "[crio.nri]\nenable_nri = false\n")
    found = await verdicts(node)
    assert judged(found, NRI_OFF) == "problem"
    assert "CRI-O's configuration lacks settings" in found["settings"].findings[0].what
    assert judged(found, CDI_OFF) == "good"
    checked = {name: one for name, one in found.items() if name in ("settings", "nri-socket")}
    assert "containerd" not in texts(checked)


@pytest.mark.parametrize(("version", "command"), [("cri-o://1.34.0", "crio status config"), ("docker://24.0.0", "")])
async def test_the_files_of_an_unused_containerd_are_ignored(version: str, command: str, node: FaultyNode) -> None:
    """The kubelet reports a different runtime, so every check is unknown, with a remedy for that runtime."""
    runs(node, version)
    node.host(PLAIN, IMPORTS + BOTH_ON)
    found = await verdicts(node)
    assert {found[name].result for name in RUNTIME} == {"unknown"}
    assert command in texts(found)
    assert "containerd config dump" not in texts(found)


async def test_the_runtimes_output_replaces_its_files(node: FaultyNode, tmp_path: Path) -> None:
    """The dump contains the settings that containerd uses, whatever its files contain. Files that are not imported do
    not appear in it.
    """
    node.host(PLAIN, DOCKER)
    given = tmp_path / "dump"
    document = dump("2.2", {"default_validator": node.nri["default_validator"]}, {"cdi_spec_dirs": [str(node.cdi)]})
    given.write_text(toml_text(document))
    found = await verdicts(node, runtime_config=str(given))
    assert {found[name].result for name in RUNTIME} == {"good"}
    assert found["drop-in"].result == "unknown"
    document["plugins"][NRI]["disable"] = True
    given.write_text(toml_text(document))
    found = await verdicts(node, runtime_config=str(given))
    assert judged(found, NRI_OFF) == "problem"
    assert "the output of containerd config dump" in found["settings"].findings[0].what


@pytest.mark.parametrize(
    ("key", "value", "check"),
    [("disable_connections", True, "settings"), ("socket_path", "/run/other.sock", "nri-socket")],
)
async def test_a_socket_that_plugins_cannot_connect_to_is_a_problem(
    key: str, value: Any, check: str, node: FaultyNode
) -> None:
    """The backend is one of the plugins that connect to the runtime."""
    node.nri[key] = value
    assert (await verdicts(node))[check].result == "problem"


def test_standard_input_is_a_single_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kubelet's document and the runtime's document cannot both come from standard input."""
    (tmp_path / "config.yaml").write_text("{}")
    both = ["--kubelet-config", "-", "--runtime-config", "-"]
    assert cli.main(["doctor", "--config", str(tmp_path / "config.yaml"), *both]) == 2
    assert "only one of" in capsys.readouterr().err
    (tmp_path / "dump").write_text("version = 2\n")
    assert (
        cli.main(["doctor", "--config", str(tmp_path / "config.yaml"), "--runtime-config", str(tmp_path / "dump")]) == 2
    )
    assert "config dump" in capsys.readouterr().err
