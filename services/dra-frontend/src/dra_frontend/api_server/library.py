# SPDX-License-Identifier: Apache-2.0
"""Imports the names from kubernetes-asyncio that this driver uses (docs/adr/0027-kubernetes-asyncio.md).

The ``__init__`` of ``kubernetes_asyncio`` imports every API and all 767 models, which takes 36 MB of memory. The driver
exchanges plain JSON documents and uses none of these models. This module therefore registers ``kubernetes_asyncio`` and
its packages ``client``, ``client.api`` and ``client.models`` as lazy packages. If kubernetes_asyncio has already been
imported, it is used unchanged.

``urllib3`` and ``dateutil.tz`` are lazy as well, which saves another 1.7 MB. The library needs them for basic
authentication and for models with timestamps, neither of which the driver uses.
"""

from dra_frontend.lazy_packages import add_lazy_packages

add_lazy_packages(
    "kubernetes_asyncio",
    "kubernetes_asyncio.client",
    "kubernetes_asyncio.client.api",
    "kubernetes_asyncio.client.models",
    "urllib3",
    "dateutil.tz",
)

from kubernetes_asyncio.client import ApiClient, Configuration  # noqa: E402 - needs the lazy packages
from kubernetes_asyncio.config import ConfigException, load_kube_config  # noqa: E402
from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader  # noqa: E402

__all__ = ["ApiClient", "ConfigException", "Configuration", "InClusterConfigLoader", "load_kube_config"]
