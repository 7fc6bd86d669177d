# SPDX-License-Identifier: Apache-2.0
"""Strict schemas of the supported Kubernetes versions: an unknown field is an error.

They come from the kubernetes-validate package, whose own function rereads 5 MB for each object.
"""

from functools import lru_cache

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from kubernetes_validate.utils import all_versions, schema_contents
from referencing import Registry, Resource

from tests.chart.helm import Document

VERSIONS = ("1.34", "1.35", "1.36", "1.37")
# Kinds from other projects, whose schemas are not part of Kubernetes.
KUEUE = {"ClusterQueue", "LocalQueue", "ResourceFlavor"}
FOREIGN = {
    *("JobSet", "LeaderWorkerSet", "PodMonitor", "PrometheusRule", "SecurityContextConstraints"),
    *("VirtualMachineInstance", *KUEUE),
}

__all__ = ["FOREIGN", "KUEUE", "VERSIONS", "ValidationError", "check_object"]


def check_object(document: Document, version: str) -> None:
    """Raises ValidationError for an object that this version would reject, or KeyError for a version without
    schemas.
    """
    if document["kind"] not in FOREIGN:
        _validator(version, document["kind"], document["apiVersion"]).validate(document)


@lru_cache
def _definitions(version: str) -> tuple[str, Registry]:
    # The data contains one patch release for each minor version: for 1.34, the directory is named 1.34.0.
    exact = {one.rpartition(".")[0]: one for one in all_versions()}[version]
    directory = f"kubernetes-json-schema/v{exact}-local-strict"
    definitions = Resource.from_contents(schema_contents(f"{directory}/_definitions.json", version))
    return directory, definitions @ Registry()


@lru_cache
def _validator(version: str, kind: str, api_version: str) -> Draft202012Validator:
    directory, registry = _definitions(version)
    group, _, name = api_version.rpartition("/")
    file = "-".join(part for part in (kind.lower(), group.partition(".")[0], name) if part)
    schema = schema_contents(f"{directory}/{file}.json", version)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ registry)
