# SPDX-License-Identifier: Apache-2.0
"""The names of kubernetes-asyncio that this driver uses (docs/adr/0027-kubernetes-asyncio.md).

The ``__init__`` of ``kubernetes_asyncio`` imports every API and all 767 models, which takes 36 MB of memory. The driver
sends and receives plain JSON documents and uses none of them. So this module adds ``kubernetes_asyncio`` and its
packages ``client``, ``client.api`` and ``client.models`` as lazy packages. If kubernetes_asyncio has been imported
before, it is used as it is.

``urllib3`` and ``dateutil.tz`` are lazy as well, which saves another 1.7 MB. The library uses them for basic
authentication and for models with a time stamp. The driver uses neither.
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
