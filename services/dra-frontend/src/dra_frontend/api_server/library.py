# SPDX-License-Identifier: Apache-2.0
"""The modules of kubernetes-asyncio that we use, without its 767 models (docs/adr/0001-partial-kubernetes-import.md).

An ordinary import of any submodule runs the package's ``__init__``, which imports every API and every model. Here the
three parent packages are replaced by empty ones **while** the parts are imported. Afterwards nothing of it is left in
``sys.modules``: whoever imports kubernetes_asyncio later gets the whole, ordinary package. If somebody did so before
us, the parts are taken from there. One thread must do this import; the services import at start, before any thread.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_PACKAGE: Final = "kubernetes_asyncio"
_PARENTS: Final = (_PACKAGE, f"{_PACKAGE}.client", f"{_PACKAGE}.config")
PARTS: Final = (
    f"{_PACKAGE}.client.rest",
    f"{_PACKAGE}.config.config_exception",
    f"{_PACKAGE}.config.incluster_config",
    f"{_PACKAGE}.config.kube_config",
)


class _NotLoaded:
    """Stands for ``ApiClient`` and ``Configuration``, which the parts name in annotations and unused defaults."""


def _empty_parents() -> dict[str, ModuleType]:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{_PACKAGE} is not installed", name=_PACKAGE)
    root = Path(spec.submodule_search_locations[0])
    parents = {}
    for name in _PARENTS:
        parent = ModuleType(name)
        parent.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        parents[name] = parent
    for name in ("ApiClient", "Configuration"):
        setattr(parents[f"{_PACKAGE}.client"], name, _NotLoaded)
    return parents


def _import_parts() -> dict[str, ModuleType]:
    if _PACKAGE in sys.modules:
        return {name: importlib.import_module(name) for name in PARTS}
    sys.modules.update(_empty_parents())
    try:
        return {name: importlib.import_module(name) for name in PARTS}
    finally:
        for name in [name for name in sys.modules if name == _PACKAGE or name.startswith(f"{_PACKAGE}.")]:
            del sys.modules[name]


_parts = _import_parts()
RESTClientObject: Final[Any] = _parts[f"{_PACKAGE}.client.rest"].RESTClientObject
ConfigException: Final[type[Exception]] = _parts[f"{_PACKAGE}.config.config_exception"].ConfigException
InClusterConfigLoader: Final[Any] = _parts[f"{_PACKAGE}.config.incluster_config"].InClusterConfigLoader
load_kube_config: Final[Any] = _parts[f"{_PACKAGE}.config.kube_config"].load_kube_config
