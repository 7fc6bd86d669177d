# SPDX-License-Identifier: Apache-2.0
"""Measured values that run.sh prints after the tests. Inside an emulated machine they show order, not size."""

from tests.node.rig.services import LOGS


def note(name: str, value: str) -> None:
    """Adds one line to the list of figures."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / "figures.txt").open("a") as file:
        file.write(f"{name:<58} {value}\n")
