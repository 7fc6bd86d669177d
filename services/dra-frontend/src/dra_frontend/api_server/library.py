# SPDX-License-Identifier: Apache-2.0
"""The names of kubernetes-asyncio that this driver uses (docs/adr/0027-kubernetes-asyncio.md).

The ``__init__`` of the package imports every API and all 767 models, which takes 36 MB of memory. The driver sends and
receives plain JSON documents and uses none of them. So this module makes the packages lazy whose ``__init__`` imports
generated code. If kubernetes_asyncio has been imported before, it is used as it is.

urllib3 and the time zones of python-dateutil take another 1.7 MB. The library uses them for basic authentication and
for models with a time, of which the driver has neither.
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
