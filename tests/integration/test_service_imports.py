# SPDX-License-Identifier: Apache-2.0
"""The modules that a running service has imported."""

import re

from tests.stage.pods import claim_pod, cpus
from tests.stage.settings import OUR_FRONTEND
from tests.stage.stage import OpenStage
from tests.stage.wires import ask_unix


def test_a_running_service_has_imported_no_tool_and_nothing_large_that_it_does_not_use(open_stage: OpenStage) -> None:
    """The import contract sees import statements. This sees what a service imported to prepare a claim and show it."""
    stage = open_stage(frontend=OUR_FRONTEND.replace(" -m ", " -X importtime -m ", 1))
    instance = stage.add_ready_instance()
    with claim_pod(stage, "one", cpus(1)) as pod:
        pod.prepare()
        pod.run()
        for path in ("/v1/claims", "/v1/cpus", "/openapi.json", "/metrics", "/readyz"):
            ask_unix(instance.state_socket, path)
    log = instance.frontend.log_file.read_text()
    imported = set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", log, re.MULTILINE))
    assert {"dra_frontend.app", "dra_frontend.claims.store", "fastapi"} <= imported
    assert {name for name in imported if name.startswith("numa_tools")} == {"numa_tools", "numa_tools.cli"}
    unused = ("pydantic.v1.", "kubernetes_asyncio.client.models.", "kubernetes_asyncio.client.api.")
    assert not [name for name in imported if name.startswith(unused)]
