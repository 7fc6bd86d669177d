# SPDX-License-Identifier: Apache-2.0
"""Defers the execution of other projects' package ``__init__`` files until it is needed
(docs/adr/0027-kubernetes-asyncio.md).

Before Python imports a module from a package, it executes the package's ``__init__``. Some of these files import far
more than the module needs: 767 model classes, a command-line interface, an HTTP client. A lazy package is in
``sys.modules`` like any other package. It resolves each of its names on first access (PEP 562), so every name is still
available to all importers.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any


def add_lazy_packages(*names: str) -> None:
    """Adds packages to ``sys.modules`` without executing their ``__init__``. Parents must precede their children.

    A package that has already been imported is left as it is. Raises ImportError if a package is not installed.
    """
    for name in names:
        if name not in sys.modules:
            _add(name)


def _add(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or spec.loader is None:
        raise ImportError(f"{name} is not installed", name=name)
    package, loader, source = importlib.util.module_from_spec(spec), spec.loader, Path(spec.origin)

    def load(attribute: str) -> Any:
        """Imports a submodule, or a name that the ``__init__`` imports on a line of the form ``from MODULE import
        NAME``, without executing the ``__init__``. For any other name, executes the ``__init__``.
        """
        line = re.search(rf"^from (\S+) import {re.escape(attribute)}$", source.read_text(), re.MULTILINE)
        try:
            if line:
                value = getattr(importlib.import_module(line[1], name), attribute)
            elif importlib.util.find_spec(f"{name}.{attribute}"):
                value = importlib.import_module(f"{name}.{attribute}")
            else:
                _execute(package, loader, load)
                return getattr(package, attribute)
        except ImportError as error:  # the image does not contain any generated modules (hack/image/install.sh)
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}") from error
        setattr(package, attribute, value)
        return value

    vars(package)["__getattr__"] = load
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)


def _execute(package: ModuleType, loader: Loader, load: Callable[[str], Any]) -> None:
    """Executes a package's ``__init__``. If that fails, the package stays lazy, so that the next access tries again."""
    del vars(package)["__getattr__"]
    try:
        loader.exec_module(package)
    except BaseException:
        vars(package)["__getattr__"] = load
        raise
