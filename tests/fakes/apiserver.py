# SPDX-License-Identifier: Apache-2.0
"""A fake API server with the parts that a DRA driver and a scheduler use. It contains no code from this project's
driver.

``python -m tests.fakes.apiserver --port-file FILE --kubeconfig-out FILE`` runs it as a process. Faults can also be
injected over HTTP: see ``ApiServer.control`` (POST /fake).
"""

import argparse
import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from tests.fakes import apiserver_devices as devices
from tests.fakes import apiserver_discovery, apiserver_exec, apiserver_patches, apiserver_protobuf
from tests.fakes.apiserver_allocatable import GATE, check_declared
from tests.fakes.apiserver_reviews import OPEN, REVIEWS, VERSION, denied
from tests.fakes.apiserver_reviews import answer as open_answer
from tests.fakes.apiserver_rules import admit
from tests.fakes.apiserver_store import NODES, RESOURCES, ApiError, Document, Resource, Store
from tests.fakes.apiserver_values import Fault, Options, Served, Target
from tests.fakes.apiserver_watch import Watch, matches
from tests.fakes.control import stopping

_PATCHES = {
    apiserver_patches.MERGE: apiserver_patches.merge,
    apiserver_patches.STRATEGIC: apiserver_patches.strategic_merge,
}
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class ApiServer:
    """The server, used with ``async with``. ``url`` is its address, ``store`` contains its objects, and ``served`` the
    requests that it has answered.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.store = Store(admit=self._admit)
        self.served: list[Served] = []
        self.faults: list[Fault] = []
        self.watches: list[Watch] = []
        self.url = ""
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**23)
        app.router.add_post("/fake", self._control_over_http)
        app.router.add_routes(
            [*apiserver_discovery.routes(self.options.not_served), *apiserver_exec.routes(self.options.node_socket)]
        )
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.options.address, 0, ssl_context=self._tls())
        await site.start()
        scheme = "https" if self.options.certificate else "http"
        self.url = f"{scheme}://{self.options.address}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self.drop_watches()
        await self._runner.cleanup()

    def _admit(self, resource: Resource, new: Document, old: Document | None) -> Document:
        options = self.options
        admitted = admit(options.gates, resource, new, old, options.version)
        if resource.name == "resourceslices" and (node := (admitted.get("spec") or {}).get("nodeName")):
            nodes = {one["metadata"]["name"]: one for one in self.store.select(NODES)}
            check_declared(resource, admitted, nodes.get(node, {"metadata": {"name": node}}))
        return admitted

    def write_kubeconfig(self, path: Path, *, user: Mapping[str, Any] | None = None) -> Path:
        """Writes a kubeconfig for this server. ``user`` is its user entry, by default a token that the server
        accepts.
        """
        token = {"token": min(self.options.tokens)} if self.options.tokens else {}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": dict(user) if user is not None else token}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        }
        path.write_text(json.dumps(document, indent=1))
        return path

    def fail_next(self, count: int, answer: int | str, **fault: Any) -> None:
        """Injects a fault into the next ``count`` requests. ``answer`` is an HTTP code, ``"hang"`` or ``"drop"``;
        further arguments are fields of Fault.
        """
        self.faults.append(Fault(count, str(answer), **fault))

    def drop_watches(self) -> None:
        """Breaks all open watches."""
        for watch in self.watches:
            watch.drop()

    def compact(self) -> None:
        """Drops the history: watches that are open or resume from an earlier version get 410."""
        self.store.forget_history()
        self.drop_watches()

    def writes(self, resource: str = "resourceslices") -> list[Served]:
        """Returns the successful writes to objects of a kind."""
        changing = {"create", "update", "patch", "delete", "deletecollection"}
        return [
            one
            for one in self.served
            if one.verb in changing and one.resource == resource and one.code < 300 and not one.dry_run
        ]

    def control(self, command: Document) -> Document:
        """Carries out one item of ``POST /fake``: no_faults, fail_next, drop_watches, forbidden, gates, version or
        served.
        """
        if command.get("no_faults"):
            self.faults.clear()
        if "fail_next" in command:
            self.fail_next(**command["fail_next"])
        if command.get("drop_watches"):
            self.drop_watches()
        if "forbidden" in command:
            self.options.forbidden = {(verb, resource) for verb, resource in command["forbidden"]}
        self.options.gates.update(command.get("gates") or {})
        self.options.version = command.get("version", self.options.version)
        return {"served": [vars(one) for one in self.served]} if command.get("served") else {}

    def _tls(self) -> ssl.SSLContext | None:
        if self.options.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.options.certificate, self.options.key)
        return context

    async def _control_over_http(self, request: web.Request) -> web.Response:
        return web.json_response(self.control(await request.json()))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        target: Target | None = None
        verb = "get"
        try:
            target = self._target(request.path)
            verb = _verb(request, target)
            odd = await self._inject_fault(request, verb, target)
            _check_accept(request)
            self._authorize(request, verb, target)
            answer = odd if odd is not None else await self._answer(request, verb, target)
            code = 201 if verb == "create" else 200
            response = answer if isinstance(answer, web.StreamResponse) else web.json_response(answer, status=code)
        except ApiError as error:
            headers = {"Retry-After": str(error.__cause__)} if error.__cause__ else {}
            response = web.json_response(error.status(), status=error.code, headers=headers)
        self.served.append(
            Served(
                verb,
                target.resource.name if target else request.path,
                target.name if target else "",
                response.status,
                dry_run="dryRun" in request.query,
                agent=request.headers.get("User-Agent", ""),
            )
        )
        return response

    def _target(self, path: str) -> Target:
        group, parts = "", path.strip("/").split("/")
        if parts[:2] == ["api", "v1"]:
            parts = parts[2:]
        elif len(parts) > 3 and parts[0] == "apis" and parts[2] == "v1":
            group, parts = parts[1], parts[3:]
        elif parts == [VERSION.name]:
            return Target(VERSION, "", "", "")
        else:
            parts = []
        namespace = ""
        if len(parts) > 2 and parts[0] == "namespaces" and parts[2] != "status":
            namespace, parts = parts[1], parts[2:]
        for resource in (*RESOURCES, REVIEWS):
            if parts and (resource.group, resource.name) == (group, parts[0]) and group not in self.options.not_served:
                return Target(resource, namespace, *(*parts[1:3], "", "")[:2])
        raise ApiError(404, "NotFound", "the server could not find the requested resource")

    async def _inject_fault(self, request: web.Request, verb: str, target: Target) -> web.Response | None:
        agent = request.headers.get("User-Agent", "")
        for fault in self.faults:
            meant = fault.verb in {"", verb} and fault.resource in {"", target.resource.name}
            if fault.count > 0 and meant and agent.startswith(fault.agent):
                fault.count -= 1
                if fault.body is not None:
                    return web.Response(status=int(fault.answer), text=fault.body, content_type="application/json")
                if fault.answer == "hang":
                    await self._stopping.wait()
                if fault.answer in {"hang", "drop"}:
                    assert request.transport is not None
                    request.transport.abort()
                    raise ApiError(500, "InternalError", "the connection is closed, so no client reads this")
                error = ApiError(int(fault.answer), "Injected", f"injected fault {fault.answer}")
                raise error from (Exception(fault.retry_after) if fault.retry_after else None)
        return None

    def _authorize(self, request: web.Request, verb: str, target: Target) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.options.tokens is not None and token not in self.options.tokens:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        resource, group = "/".join(filter(None, (target.resource.name, target.part))), target.resource.group
        if target.resource not in OPEN and denied(self.options, verb, group, resource):
            raise _forbidden(verb, resource, target)

    async def _answer(self, request: web.Request, verb: str, target: Target) -> Document | web.StreamResponse:
        resource, namespace, name = target.resource, target.namespace, target.name
        if resource in OPEN:
            return open_answer(self.options, resource, _body(request, await request.read()))
        if verb == "watch":
            return await self._watch(Watch(self.store, request, resource, namespace))
        if verb == "get":
            return self._proxied(request, name) if target.part == "proxy" else self.store.get(resource, namespace, name)
        if verb in {"list", "deletecollection"}:
            items = [one for one in self.store.select(resource, namespace) if matches(resource, request, one)]
            for item in items if verb == "deletecollection" else []:
                self.store.delete(resource, item["metadata"].get("namespace", ""), item["metadata"]["name"])
            metadata = {"resourceVersion": str(self.store.version)}
            start, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "0")) or len(items)
            if verb == "list" and len(items) > start + limit:
                metadata["continue"] = str(start + limit)
            items = items[start : start + limit]
            return {
                "kind": f"{resource.kind}List",
                "apiVersion": resource.api_version,
                "metadata": metadata,
                "items": items,
            }
        body = _body(request, await request.read())
        if verb == "delete":
            return self.store.delete(resource, namespace, name, body.get("preconditions"))
        if verb == "create":
            if resource.namespaced and not namespace:
                raise ApiError(405, "MethodNotAllowed", f"{resource.name} must be created in a namespace")
            return self.store.create(resource, namespace, body, dry_run="dryRun" in request.query)
        if verb == "patch":
            return self._patch(target, body, request)
        return self.store.update(resource, namespace, name, body, target.part)

    def _proxied(self, request: web.Request, node: str) -> Document:
        """Returns the response from a node's kubelet; only the configz path is implemented."""
        if node not in self.options.kubelets or not request.path.endswith("/proxy/configz"):
            raise ApiError(503, "ServiceUnavailable", "error trying to reach service: this node has no kubelet")
        return {"kubeletconfig": self.options.kubelets[node]}

    def _patch(self, target: Target, body: Document, request: web.Request) -> Document:
        """Carries out a merge patch, a strategic merge patch, or a server-side apply on a claim's status."""
        old = self.store.get(target.resource, target.namespace, target.name)
        if request.content_type in _PATCHES:
            new = _PATCHES[request.content_type](old, body)
            return self.store.update(target.resource, target.namespace, target.name, new, target.part)
        if request.content_type != "application/apply-patch+yaml" or target.part != "status":
            raise ApiError(415, "UnsupportedMediaType", "only status can be applied, as application/apply-patch+yaml")
        new = devices.applied(old, devices.identity(body), request.query["fieldManager"])
        rules, release = self.options.rules, tuple(map(int, self.options.version.split(".")))
        for driver in devices.changed_drivers(new, old) if rules is not None and release >= (1, 36) else ():
            if not devices.may_write(rules or [], "patch", driver, self.options.node, old):
                raise _forbidden("associated-node:patch", "resourceclaims/driver", target)
        return self.store.update(target.resource, target.namespace, target.name, new, "status")

    async def _watch(self, watch: Watch) -> web.StreamResponse:
        self.watches.append(watch)
        try:
            return await watch.serve()
        finally:
            self.watches.remove(watch)


def _forbidden(verb: str, resource: str, target: Target) -> ApiError:
    text = f'User "fake" cannot {verb} resource "{resource}" in API group "{target.resource.group}"'
    return ApiError(403, "Forbidden", f"{target.resource.name} is forbidden: {text}", target.name)


def _check_accept(request: web.Request) -> None:
    accepted = request.headers.get("Accept", "*/*")
    if not any(kind in accepted for kind in ("json", "*/*", "application/*")):
        text = f"this server responds only with application/json, but the client accepts {accepted}"
        raise ApiError(406, "NotAcceptable", text)


def _body(request: web.Request, data: bytes) -> Any:
    if data and request.content_type == apiserver_protobuf.MEDIA_TYPE:
        return apiserver_protobuf.read_object(data)
    return json.loads(data or b"{}")


def _verb(request: web.Request, target: Target) -> str:
    if request.method == "GET":
        watching = request.query.get("watch") in {"1", "true"}
        return "watch" if watching else "get" if target.name else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if request.method not in _VERBS:
        raise ApiError(405, "MethodNotAllowed", f"{request.method} is not supported")
    return _VERBS[request.method]


async def _main(arguments: argparse.Namespace) -> None:
    options = Options(version=arguments.version, node_socket=arguments.node_socket, address=arguments.address)
    options.gates |= dict.fromkeys(arguments.gate_off, False) | dict.fromkeys(arguments.gate_on, True)
    stop = stopping()
    async with ApiServer(options) as server:
        if arguments.kubeconfig_out:
            server.write_kubeconfig(arguments.kubeconfig_out)
        for node in arguments.node:
            # The nodes' kubelets have the same feature gates as the API server, and reserve 128 MiB of memory.
            declared = [GATE] if options.gates[GATE] and options.version == "1.37" else []
            amounts = {"capacity": {"memory": "64Gi"}, "allocatable": {"memory": "65408Mi"}}
            document = {"metadata": {"name": node}, "status": {**amounts, "declaredFeatures": declared}}
            server.store.create(NODES, "", document)
        if arguments.port_file:
            # This file is written last and then renamed into place, so a reader that waits for it finds everything
            # else ready.
            part = arguments.port_file.with_suffix(".part")
            part.write_text(server.url.rpartition(":")[2])
            part.rename(arguments.port_file)
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.apiserver", description=__doc__)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--kubeconfig-out", type=Path)
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--gate-off", action="append", default=[], help="feature gate to turn off")
    parser.add_argument("--gate-on", action="append", default=[], help="feature gate to turn on")
    parser.add_argument("--version", default="1.36", help="Kubernetes release to imitate")
    parser.add_argument("--node-socket", type=Path, help="socket of the node that executes commands (apiserver_exec)")
    parser.add_argument("--node", action="append", default=[], help="Node to create at the start")
    asyncio.run(_main(parser.parse_args()))
