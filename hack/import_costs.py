# SPDX-License-Identifier: Apache-2.0
"""Prints how much anonymous memory each service's imports use, by package: the table in docs/benchmarks.md.

  python -m hack.import_costs                    both services, with this interpreter
  python -m hack.import_costs MODULE ARGUMENT    one of SERVICES, as JSON: in the root file system of its image

The images have a different interpreter, and byte code without docstrings (hack/image/compile.py).

A package's figure is the memory used by executing its own modules. Modules that it imports from another package count
towards that package. Unlike the code of shared libraries, anonymous memory is not shared between processes.
"""

import importlib
import importlib.machinery
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final

SERVICES: Final = {
    "frontend": ("numa_tools.cli", "--config=/nowhere/config.yaml"),
    "backend": ("nri_backend.__main__", "--version"),
}
"""For each service, the module with ``main`` and an argument that makes it import everything and exit."""
_OURS: Final = ("numa_contract", "numa_node", "dra_frontend", "numa_tools", "nri_backend")
_MIN_KIB: Final = 240
"""Packages that use less memory than this, in KiB, are combined in one row."""
REASONS: Final = {
    "own modules": "the service itself",
    "pydantic": "reads and checks all documents; its schemas are built when it is imported",
    "asyncio": "event loop, with subprocess and logging",
    "aiohttp": "client for the API server, used by kubernetes_asyncio (ADR 27)",
    "google": "Protocol Buffers: messages of the kubelet (frontend) and of NRI (backend)",
    "grpc": "server for the kubelet's calls; its library adds 10 MB of code",
    "email": "HTTP headers in aiohttp and the standard library",
    "yaml": "reads the configuration file",
    "argparse": "reads the command line",
    "inspect": "imported by asyncio",
    "ast": "imported by inspect",
    "logging": "the log",
    "typing": "type annotations in pydantic's models",
    "typing_extensions": "type annotations in pydantic's models",
    "annotated_types": "type annotations in pydantic's models",
    "hashlib": "OpenSSL, which ssl would load otherwise",
    "html": "imported by starlette for error pages, and by prometheus_client",
    "http": "client and cookies, imported by aiohttp; status codes",
    "multiprocessing": "imported by kubernetes_asyncio for threaded calls, which the frontend does not use",
    "pickle": "imported by multiprocessing and aiohttp",
    "anyio": "imported by starlette",
    "uvicorn": "HTTP server of the state socket and the ports (ADR 25)",
    "idna": "host names in aiohttp",
    "attr": "classes in aiohttp",
    "h11": "HTTP parser: the backend's client, the frontend's server",
    "ssl": "TLS to the API server; the backend's image has no OpenSSL",
    "starlette": "HTTP routes; FastAPI is imported at the first request for a document",
    "urllib": "proxies, in aiohttp and prometheus_client",
    "prometheus_client": "metrics",
    "kubernetes_asyncio": "kubeconfig, tokens and requests (ADR 27)",
}


@contextmanager
def _measured(cost: Callable[[str, int], None]) -> Iterator[None]:
    """Calls ``cost`` for each module that is executed within this context. The arguments are the module's name and the
    anonymous memory, in KiB, that executing the module uses. The memory used by its imports is not included.
    """
    stack: list[int] = []

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: object, module: Any) -> Any:
            before = _anonymous_kib()
            stack.append(0)
            try:
                return method(self, module)
            finally:
                total, inner = _anonymous_kib() - before, stack.pop()
                cost(getattr(module, "__name__", None) or module.name, total - inner)
                if stack:
                    stack[-1] += total

        return run

    loaders = importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader
    methods = [(loaders[0], "exec_module"), (loaders[1], "create_module"), (loaders[1], "exec_module")]
    originals = [getattr(loader, name) for loader, name in methods]
    for (loader, name), method in zip(methods, originals, strict=True):
        setattr(loader, name, wrapped(method))
    yield
    for (loader, name), method in zip(methods, originals, strict=True):
        setattr(loader, name, method)


def _anonymous_kib() -> int:
    return int(Path("/proc/self/smaps_rollup").read_text().split("Anonymous:")[1].split()[0])


def costs(entry: str, argument: str) -> dict[str, int]:
    """Starts a service in this process so that it imports its modules. Returns the memory that each package takes, in
    KiB.
    """
    found: Counter[str] = Counter()

    def cost(module: str, kib: int) -> None:
        package = module.partition(".")[0]
        found["own modules" if package in _OURS else package.removeprefix("_").removesuffix("_core")] += kib

    discarded = io.StringIO()
    with _measured(cost), redirect_stdout(discarded), redirect_stderr(discarded), suppress(SystemExit):
        importlib.import_module(entry).main([argument])
    return dict(found)


def table(services: dict[str, dict[str, int]]) -> str:
    """Returns the table for these services: the largest packages, and the sum of all others."""
    package_names = {name for found in services.values() for name in found}
    names = {name for found in services.values() for name, kib in found.items() if kib >= _MIN_KIB}
    ordered = sorted(names, key=lambda name: -max(found.get(name, 0) for found in services.values()))
    rows = [(name, _cells(services, {name}), REASONS.get(name, "")) for name in ordered]
    rows += [
        ("all others", _cells(services, package_names - names), ""),
        ("total", _cells(services, package_names), ""),
    ]
    head = f"| package | {', '.join(services)}: MB | why it is needed |\n|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(row).rstrip()} |" for row in rows)


def _cells(services: dict[str, dict[str, int]], names: set[str]) -> str:
    sums = [sum(found.get(name, 0) for name in names) for found in services.values()]
    return ", ".join(f"{kib * 1024 / 1e6:.1f}" if kib else "-" for kib in sums)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(costs(*sys.argv[1:])))
    else:
        command = [sys.executable, "-m", "hack.import_costs"]
        done = {
            name: subprocess.run([*command, *entry], check=True, capture_output=True, text=True).stdout  # noqa: S603
            for name, entry in SERVICES.items()
        }
        print(table({name: json.loads(text) for name, text in done.items()}))
