# SPDX-License-Identifier: Apache-2.0
"""Fails when the structure of kubernetes-asyncio moves: docs/adr/0001-partial-kubernetes-import.md."""

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from dra_frontend.api_server.credentials import Settings
from dra_frontend.api_server.library import PARTS

ROOT = Path(str(importlib.metadata.distribution("kubernetes-asyncio").locate_file("kubernetes_asyncio")))


def run(code: str) -> str:
    """Runs Python code in a process that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_is_the_one_that_was_read() -> None:
    """Another major version is a reason to read its sources again before trusting the partial import."""
    assert importlib.metadata.version("kubernetes-asyncio").startswith("36.")


def test_import_loads_no_model_and_leaves_nothing_behind() -> None:
    """The door costs its parts only, and the next one to import the package gets all of it."""
    code = """
import json, sys
seen = []
class Spy:
    def find_spec(name, path=None, target=None):
        seen.append(name)
sys.meta_path.insert(0, Spy)
import dra_frontend.api_server.client
ours = sorted(name for name in seen if name.startswith("kubernetes_asyncio."))
left = [name for name in sys.modules if name.split(".")[0] == "kubernetes_asyncio"]
print(json.dumps([ours, left]))
"""
    ours, left = json.loads(run(code))
    assert left == []
    assert set(PARTS) <= set(ours)
    assert not [name for name in ours if ".models" in name or ".client.api" in name or name.endswith("api_client")]
    assert len(ours) <= len(PARTS) + 6, ours


@pytest.mark.parametrize("first", ["ours", "whole"])
def test_the_whole_package_works_beside_ours(first: str) -> None:
    """Who imports kubernetes_asyncio after us gets all of it; who did so before shares its modules with us."""
    imports = ["import dra_frontend.api_server.library as ours", "import kubernetes_asyncio as whole"]
    lines = imports if first == "ours" else imports[::-1]
    run(
        "\n".join(lines)
        + f"""
assert whole.client.CoreV1Api and whole.client.V1Pod(metadata=whole.client.V1ObjectMeta(name="x")).metadata.name == "x"
assert (ours.RESTClientObject is whole.client.rest.RESTClientObject) == {first == "whole"}
assert (ours.load_kube_config is whole.config.load_kube_config) == {first == "whole"}
"""
    )


def test_settings_stand_for_the_configuration() -> None:
    """Our settings have every attribute that the REST client reads, with the library's name and default."""
    tree = ast.parse((ROOT / "client" / "rest.py").read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "configuration"
    }
    assert read, "the REST client does not read a configuration any more"
    assert read <= {field.name for field in fields(Settings)}
    code = """
import json
from dataclasses import asdict
from kubernetes_asyncio.client import Configuration
from dra_frontend.api_server.credentials import Settings
real = Configuration()
print(json.dumps({key: [value, getattr(real, key)] for key, value in asdict(Settings()).items()}))
"""
    pairs = json.loads(run(code))
    assert {key for key, (one, other) in pairs.items() if one != other} == {"connection_pool_maxsize"}


def test_loader_keys_are_settings() -> None:
    """Whatever the kubeconfig loader sets is a field of ours: slots would refuse a new one."""
    names = {"host", "api_key", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "tls_server_name", "proxy"}
    source = (ROOT / "config" / "kube_config.py").read_text()
    function = next(
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "_set_config"
    )
    keys = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert keys - {"token", "BearerToken"} <= names
    assert names <= {field.name for field in fields(Settings)}
