# SPDX-License-Identifier: Apache-2.0
"""API requests that every authenticated client may send: the server's version and its own permissions."""

from tests.fakes import apiserver_devices as devices
from tests.fakes.apiserver_store import Document, Resource
from tests.fakes.apiserver_values import Options

VERSION = Resource("", "version", "Info")
REVIEWS = Resource("authorization.k8s.io", "selfsubjectaccessreviews", "SelfSubjectAccessReview")
OPEN = (VERSION, REVIEWS)


def denied(options: Options, verb: str, group: str, resource: str, name: str = "") -> bool:
    """Returns True if RBAC denies the request to the caller; ``resource`` includes the subresource."""
    rules = options.rules
    return (verb, resource) in options.forbidden or (
        rules is not None and not devices.allows(rules, verb, group, resource, name)
    )


def answer(options: Options, resource: Resource, body: Document) -> Document:
    """Returns the response to one of the requests in OPEN."""
    if resource is VERSION:
        major, minor = options.version.split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{options.version}.0"}
    asked = body["spec"]["resourceAttributes"]
    what = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
    no = denied(options, asked["verb"], asked.get("group", ""), what, asked.get("name", ""))
    return body | {"kind": REVIEWS.kind, "metadata": {}, "status": {"allowed": not no}}
