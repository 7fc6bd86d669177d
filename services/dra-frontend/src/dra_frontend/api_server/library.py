# SPDX-License-Identifier: Apache-2.0
"""The names of kubernetes-asyncio that this driver uses (docs/adr/0027-kubernetes-asyncio.md).

The ``__init__`` of the package imports every API and all 767 models, which takes 36 MB of memory. The driver sends and
receives plain JSON documents and uses none of them. So this module imports the package with lazy ``__init__`` modules,
which import a name when it is first used (PEP 562). They stay in ``sys.modules`` and provide every name to a later
importer as well. If the package has been imported before, it is used as it is.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, Final

_GENERATED: Final = (
    "kubernetes_asyncio",
    "kubernetes_asyncio.client",
    "kubernetes_asyncio.client.api",
    "kubernetes_asyncio.client.models",
)
"""The packages whose ``__init__`` imports generated code, parents first."""


def _add_lazy_package(name: str) -> None:
    """Adds a package to ``sys.modules`` without executing its ``__init__``. Raises ImportError."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"{name} is not installed", name=name)
    package, source = importlib.util.module_from_spec(spec), Path(spec.origin)

    def load(attribute: str) -> Any:
        """Imports a name that the ``__init__`` would import from a module, or a submodule of that name."""
        line = re.search(rf"^from (\S+) import {re.escape(attribute)}$", source.read_text(), re.MULTILINE)
        try:
            value = importlib.import_module(line[1] if line else f"{name}.{attribute}")
        except ModuleNotFoundError as error:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}") from error
        value = getattr(value, attribute) if line else value
        setattr(package, attribute, value)
        return value

    vars(package)["__getattr__"] = load
    sys.modules[name] = package


if _GENERATED[0] not in sys.modules:
    for _name in _GENERATED:
        _add_lazy_package(_name)

from kubernetes_asyncio.client import ApiClient, Configuration  # noqa: E402 - needs the lazy packages
from kubernetes_asyncio.config import ConfigException, load_kube_config  # noqa: E402
from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader  # noqa: E402

__all__ = ["ApiClient", "ConfigException", "Configuration", "InClusterConfigLoader", "load_kube_config"]
