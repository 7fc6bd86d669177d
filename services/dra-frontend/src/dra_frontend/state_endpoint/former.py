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
Reported = Callable[[], None]


def former_routes(
    app: FastAPI, backend: BackendView, reported: Reported, read_body: Callable[[Request], Awaitable[bytes]]
) -> None:
    """Adds ``PUT /v1/containers``, and ``PUT`` and ``DELETE`` of one container."""

    def take(reports: list[ContainerReport]) -> Response:
        for report in reports:
            take_former_report(report, backend.containers)
        reported()
        return Response(status_code=204)

    @app.put("/v1/containers", include_in_schema=False)
    async def several(request: Request) -> Response:
        try:
            return take(_LIST.validate_json(await read_body(request)))
        except ValidationError as error:
            raise HTTPException(422, "a report cannot be read") from error

    @app.put("/v1/containers/{id}", include_in_schema=False)
    async def one(id: str, request: Request) -> Response:  # noqa: A002 - the name is in the path
        try:
            report = ContainerReport.model_validate_json(await read_body(request))
        except ValidationError as error:
            raise HTTPException(422, "the report cannot be read") from error
        if report.id != id:
            raise HTTPException(422, "the report is about another container than the path")
        return take([report])

    @app.delete("/v1/containers/{id}", include_in_schema=False)
    async def forget(id: str) -> Response:  # noqa: A002 - the name is in the path
        backend.containers.pop(id, None)
        return take([])
