# SPDX-License-Identifier: Apache-2.0
"""The modules that a running service has imported."""

import re

from tests.stage.pods import claim_pod, cpus
from tests.stage.process import Process
from tests.stage.settings import OUR_FRONTEND
from tests.stage.stage import OpenStage
from tests.stage.wires import ask_unix

DOCUMENTS = ("fastapi", "dra_frontend.state_endpoint.api", "dra_frontend.state_endpoint.page")
"""Modules that the frontend imports when a client first requests a document. The module of the status page is also
imported if the page has its own port, which is off by default.
"""

UNUSED = (
    *("pydantic.v1.", "uvicorn.main", "click"),
    *("kubernetes_asyncio.client.models.", "kubernetes_asyncio.client.api.", "urllib3.", "dateutil.tz.", "ctypes"),
)
"""Modules that libraries import for features that the services do not use."""


def imported(service: Process) -> set[str]:
    """Returns the modules that a service with ``-X importtime`` has imported so far."""
    log = service.log_file.read_text()
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", log, re.MULTILINE))


def test_a_running_service_imports_no_tools_and_no_large_unused_modules(open_stage: OpenStage) -> None:
    """The import contract only checks import statements, so this test checks the modules that a service has imported to
    prepare and show a claim.
    """
    stage = open_stage(frontend=OUR_FRONTEND.replace(" -m ", " -X importtime -m ", 1))
    instance = stage.add_instance()
    stage.wait_registered()  # wait_ready is not used, because it reads a document
    with claim_pod(stage, "one", cpus(1)) as pod:
        pod.prepare()
        pod.run()
        for path in ("/metrics", "/readyz"):
            ask_unix(instance.state_socket, path)
        assert not imported(instance.frontend).intersection(DOCUMENTS)
        for path in ("/v1/claims", "/v1/cpus", "/openapi.json"):
            ask_unix(instance.state_socket, path)
    names = imported(instance.frontend)
    assert {"dra_frontend.app", "dra_frontend.claims.store", *DOCUMENTS} <= names
    assert {name for name in names if name.startswith("numa_tools")} == {"numa_tools", "numa_tools.cli"}
    assert not [name for name in names if name.startswith(UNUSED)]
