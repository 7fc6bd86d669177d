# SPDX-License-Identifier: Apache-2.0
"""The reports of a backend of release 0.1.0, one by one and in lists. For one release, while an upgrade passes."""

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import FastAPI, HTTPException, Request, Response
from numa_contract.reports import ContainerReport
from pydantic import TypeAdapter, ValidationError

from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.former_backend import take_former_report

_LIST: Final = TypeAdapter(list[ContainerReport])


def former_routes(
    app: FastAPI,
    backend: BackendView,
    reported: Callable[[], None],
    read_body: Callable[[Request], Awaitable[bytes]],
) -> None:
    """Adds ``PUT /v1/containers``, and ``PUT`` and ``DELETE`` of one container."""

    async def put(request: Request) -> Response:
        named = request.path_params.get("id")
        try:
            body = await read_body(request)
            reports = _LIST.validate_json(body) if named is None else [ContainerReport.model_validate_json(body)]
        except ValidationError as error:
            raise HTTPException(422, "a report cannot be read") from error
        if named is not None and reports[0].id != named:
            raise HTTPException(422, "the report is about another container than the path")
        for report in reports:
            take_former_report(report, backend.containers)
        reported()
        return Response(status_code=204)

    async def delete(request: Request) -> Response:
        backend.containers.pop(request.path_params["id"], None)
        reported()
        return Response(status_code=204)

    for path, method, endpoint in (("", "PUT", put), ("/{id}", "PUT", put), ("/{id}", "DELETE", delete)):
        app.add_api_route(f"/v1/containers{path}", endpoint, methods=[method], include_in_schema=False)
