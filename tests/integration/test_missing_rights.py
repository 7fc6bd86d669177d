# SPDX-License-Identifier: Apache-2.0
"""A rule that is missing from the ClusterRole is reported where it has an effect, with the rule to add."""

import re

import pytest

from tests.stage.pods import claim_pod, cpus
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage
from tests.stage.wires import AnsweredError


def forbid(stage: Stage, *rights: tuple[str, str]) -> None:
    """Makes RBAC deny exactly these permissions."""
    stage.api("/fake", "POST", {"forbidden": [list(one) for one in rights]})


def grant(verb: str, resource: str) -> str:
    """Returns the part of the message that gives the remedy."""
    return f'resources: ["{resource}"], verbs: ["{verb}"] in its ClusterRole'


@pytest.mark.timeout(180)
def test_a_missing_permission_is_reported_where_it_has_an_effect(open_stage: OpenStage) -> None:
    """The missing permission is reported at /readyz while slices cannot be written, and in the pod's event if a claim
    cannot be read; once it is granted, everything works.
    """
    stage = open_stage()
    forbid(stage, ("create", "resourceslices"))
    instance = stage.add_instance()
    wait_for(
        "/readyz to name the permission", lambda: grant("create", "resourceslices") in stage.unready(instance), 60.0
    )
    forbid(stage)
    stage.wait_ready(instance)
    with claim_pod(stage, "db", cpus(2)) as pod:
        forbid(stage, ("get", "resourceclaims"))
        with pytest.raises(AnsweredError, match=re.escape(grant("get", "resourceclaims"))):
            pod.prepare()
        forbid(stage)
        pod.prepare()
