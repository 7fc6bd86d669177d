# SPDX-License-Identifier: Apache-2.0
"""The lazy import of kubernetes-asyncio (docs/adr/0027-kubernetes-asyncio.md)."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

PACKAGES = ("kubernetes_asyncio.client", "kubernetes_asyncio.client.api", "kubernetes_asyncio.client.models")
"""The packages that consist of generated code."""


def run(code: str, *arguments: str) -> str:
    """Runs Python code in a process that has not imported anything yet."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_version_is_the_reviewed_one() -> None:
    """After an upgrade to another major version, the library's ``__init__`` modules and its REST client must be
    reviewed again.
    """
    assert importlib.metadata.version("kubernetes-asyncio").startswith("36.")


def test_importing_loads_neither_a_model_nor_an_api() -> None:
    """The models and APIs would take 36 MB of memory."""
    code = """
import json, sys
import dra_frontend.app
print(json.dumps([name for name in sys.modules if name.startswith("kubernetes_asyncio.")]))
"""
    loaded = json.loads(run(code))
    assert "kubernetes_asyncio.client.api_client" in loaded
    assert not [name for name in loaded if name.startswith(tuple(f"{package}." for package in PACKAGES[1:]))]
    assert len(loaded) <= 20, loaded


def test_importing_loads_neither_urllib3_nor_time_zones() -> None:
    """Together, urllib3 and dateutil's time zones would take 1.7 MB. Both can still be imported later, and all
    their names are available.
    """
    run("""
import sys
import dra_frontend.app
assert not [name for name in sys.modules if name.startswith(("urllib3.", "dateutil.tz.", "ctypes"))]
import urllib3
assert urllib3.util.make_headers(basic_auth="a:b") == {"authorization": "Basic YTpi"}
assert urllib3.PoolManager.__module__ == "urllib3.poolmanager" and urllib3.__version__
assert not hasattr(urllib3, "NoSuchName")
from dateutil import tz
from dateutil.parser import parse
assert parse("2026-01-01T00:00:00+01:00").utcoffset() == tz.tzoffset(None, 3600).utcoffset(None)
""")


NAMES = f"""
import importlib, json, sys
def names(listed):
    return {{
        f"{{package}}.{{name}}": f"{{value.__module__}}.{{value.__qualname__}}"
        for package in listed
        for name in listed[package]
        if isinstance(value := getattr(importlib.import_module(package), name), type)
    }}
PACKAGES = {PACKAGES}
"""


def test_the_lazy_package_has_the_same_names_as_the_whole_one() -> None:
    """A module that imports the package later finds every API and every model, and an unknown name raises
    AttributeError.
    """
    whole = """
import kubernetes_asyncio
listed = {package: [name for name in dir(importlib.import_module(package)) if name[0] != "_"] for package in PACKAGES}
print(json.dumps([listed, names(listed)]))
"""
    listed, expected = json.loads(run(NAMES + whole))
    assert len(expected) > 1500
    lazy = """
import dra_frontend.api_server.library
import kubernetes_asyncio.client
assert not hasattr(kubernetes_asyncio.client, "NoSuchApi")
assert kubernetes_asyncio.config.load_kube_config and kubernetes_asyncio.watch.Watch
print(json.dumps(names(json.loads(sys.argv[1]))))
"""
    assert json.loads(run(NAMES + lazy, json.dumps(listed))) == expected


@pytest.mark.parametrize("first", ["ours", "whole"])
def test_the_package_is_shared_with_other_importers(first: str) -> None:
    """Whichever import comes first, there is only one package, and its models work."""
    imports = ["import dra_frontend.api_server.library as ours", "import kubernetes_asyncio as whole"]
    lines = imports if first == "ours" else imports[::-1]
    run(
        "\n".join(lines)
        + """
from kubernetes_asyncio.client import ApiClient, CoreV1Api, V1ObjectMeta
assert ours.ApiClient is ApiClient and ours.Configuration is whole.client.Configuration
assert CoreV1Api is whole.client.CoreV1Api
assert whole.client.V1Pod(metadata=V1ObjectMeta(name="x")).metadata.name == "x"
"""
    )
