# SPDX-License-Identifier: Apache-2.0
"""Defers the execution of third-party modules that a library imports but the services rarely use.

docs/benchmarks.md lists the memory and time that each of them takes.
"""

import importlib.util
import sys
from threading import RLock
from typing import Any

_lock = RLock()


def add_lazy_modules(*names: str) -> None:
    """Adds modules to ``sys.modules`` that are executed when one of their names is first used (PEP 562).

    Only imports of the module itself are lazy (``import a.b``, ``from a import b``). Importing a name from the module
    executes the module immediately. Modules that are already imported are left unchanged. Raises ImportError.
    """
    for name in names:
        if name not in sys.modules:
            _add(name)


def _add(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not installed", name=name)
    module, loader, is_executing = importlib.util.module_from_spec(spec), spec.loader, False

    def load(attribute: str) -> Any:
        # The import system looks up names such as __path__ in each module.
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        nonlocal is_executing
        with _lock:
            # Other threads wait here until all names exist. In this thread, code that uses the module while it is still
            # being executed gets only the names that already exist.
            if vars(module).get("__getattr__") is load and not is_executing:
                is_executing = True
                try:
                    loader.exec_module(module)
                    if vars(module).get("__getattr__") is load:
                        del module.__getattr__
                finally:
                    is_executing = False
            if is_executing and attribute not in vars(module):
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(module, attribute)

    vars(module)["__getattr__"] = load
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
