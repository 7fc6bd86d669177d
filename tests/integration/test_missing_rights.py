# SPDX-License-Identifier: Apache-2.0
"""A rule of the ClusterRole that is missing is named where its absence is felt, with the rule that grants it."""

import re

import pytest

from tests.stage.pods import claim_pod, cpus
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage
from tests.stage.wires import AnsweredError


def forbid(stage: Stage, *rights: tuple[str, str]) -> None:
    """Lets RBAC deny exactly these rights."""
    stage.api("/fake", "POST", {"forbidden": [list(one) for one in rights]})


def grant(verb: str, resource: str) -> str:
    """The part of the message that says what to do."""
    return f'resources: ["{resource}"], verbs: ["{verb}"] in its ClusterRole'


@pytest.mark.timeout(180)
def test_a_missing_right_is_named_where_it_is_felt(open_stage: OpenStage) -> None:
    """At /readyz while slices cannot be written, in the pod's event when a claim cannot be read; then all is well."""
    stage = open_stage()
    forbid(stage, ("create", "resourceslices"))
    instance = stage.add_instance()
    wait_for("/readyz to name it", lambda: grant("create", "resourceslices") in stage.unready(instance), 60.0)
    forbid(stage)
    stage.wait_ready(instance)
    with claim_pod(stage, "db", cpus(2)) as pod:
        forbid(stage, ("get", "resourceclaims"))
        with pytest.raises(AnsweredError, match=re.escape(grant("get", "resourceclaims"))):
            pod.prepare()
        forbid(stage)
        pod.prepare()
