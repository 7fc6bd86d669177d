# SPDX-License-Identifier: Apache-2.0
"""The process's settings."""

import argparse

import pytest
from dra_frontend.settings import add_run_arguments, load_settings


def test_the_node_name_comes_from_the_downward_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """The downward API takes precedence over the override, which applies to all nodes. The downward API and the
    override both take precedence over the host name.
    """
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    monkeypatch.setenv("NODE_NAME", "Node-7.example")
    assert load_settings(parser.parse_args(["--hostname-override", "other"])).node_name == "node-7.example"
    monkeypatch.delenv("NODE_NAME")
    assert load_settings(parser.parse_args(["--hostname-override", "other"])).node_name == "other"
