# SPDX-License-Identifier: Apache-2.0
"""The API server's discovery documents: its groups, their resources, and an OpenAPI document for each group.

The OpenAPI documents have no schemas. kubectl and Helm read these documents to find out whether the server supports
field validation. The fake says that it does, so both clients leave the validation to the server (QueryParamVerifierV3
in k8s.io/cli-runtime/pkg/resource).
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from aiohttp import web

from tests.fakes.apiserver_store import RESOURCES, Document, Resource

_SHORT = {"daemonsets": ["ds"], "events": ["ev"], "namespaces": ["ns"], "nodes": ["no"], "pods": ["po"]}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def routes(not_served: set[str]) -> Iterable[web.RouteDef]:
    """Returns the discovery routes, except those for the groups in ``not_served``."""

    def served() -> dict[str, list[Resource]]:
        of_group = groupby(sorted(RESOURCES, key=_group), _group)
        return {group: list(found) for group, found in of_group if group not in not_served}

    async def legacy(_: web.Request) -> web.Response:
        return web.json_response({"kind": "APIVersions", "versions": ["v1"]})

    async def groups(_: web.Request) -> web.Response:
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": list(map(_listed, served()))})

    async def resources(request: web.Request) -> web.Response:
        return web.json_response(_resources(served()[_asked(request, served())]))

    async def openapi(_: web.Request) -> web.Response:
        paths = {_root(group): {"serverRelativeURL": f"/openapi/v3/{_root(group)}"} for group in served()}
        return web.json_response({"paths": paths})

    async def openapi_of(request: web.Request) -> web.Response:
        return web.json_response(_openapi(served()[_asked(request, served())]))

    yield web.get("/api", legacy)
    yield web.get("/apis", groups)
    yield web.get("/openapi/v3", openapi)
    for prefix, handler in (("", resources), ("/openapi/v3", openapi_of)):
        yield web.get(f"{prefix}/api/v1", handler)
        yield web.get(f"{prefix}/apis/{{group}}/v1", handler)


def _group(resource: Resource) -> str:
    return resource.group


def _asked(request: web.Request, served: dict[str, list[Resource]]) -> str:
    group = request.match_info.get("group", "")
    if group not in served:
        raise web.HTTPNotFound
    return group


def _root(group: str) -> str:
    return f"apis/{group}/v1" if group else "api/v1"


def _listed(group: str) -> Document:
    version = {"groupVersion": f"{group}/v1", "version": "v1"}
    return {"name": group, "versions": [version], "preferredVersion": version}


def _resources(found: Sequence[Resource]) -> Document:
    listed = [
        {
            "name": name,
            "singularName": "" if part else one.kind.lower(),
            "shortNames": [] if part else _SHORT.get(name, []),
            "namespaced": one.namespaced,
            "kind": one.kind,
            "verbs": ["get", "patch", "update"] if part else _VERBS,
        }
        for one in found
        for part in (("", "/status") if one.status else ("",))
        for name in (one.name + part,)
    ]
    document = {"kind": "APIResourceList", "apiVersion": "v1"}
    return document | {"groupVersion": found[0].api_version, "resources": listed}


def _openapi(found: Sequence[Resource]) -> Document:
    paths = {}
    for one in found:
        space = "namespaces/{namespace}/" if one.namespaced else ""
        patch = {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-group-version-kind": {"group": one.group, "version": "v1", "kind": one.kind},
        }
        paths[f"/{_root(one.group)}/{space}{one.name}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "fake"}, "paths": paths}
