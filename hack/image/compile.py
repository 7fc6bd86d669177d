# SPDX-License-Identifier: Apache-2.0
"""Compiles third-party modules for the images, without docstrings or column numbers: compile.py ROOT DIRECTORY...

Docstrings and column numbers would take up memory in each process, 2.3 MB in the frontend and 1.4 MB in the backend
(docs/benchmarks.md), and the services do not use them: tracebacks still contain line numbers. Unlike with -OO,
assertions are kept. The driver's own modules are compiled by compileall, since the state endpoint describes its
documents with docstrings.

ROOT is the directory that becomes / in the image. Python loads the compiled files without checking whether the source
has changed (unchecked hash, PEP 552).
"""

import ast
import marshal
import sys
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from typing import Final

_UNCHECKED_HASH: Final = (0b01).to_bytes(4, "little")
_WITH_DOCSTRING: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Removes the docstrings from a module and returns it."""
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            first = node.body.pop(0)
            node.body = node.body or [ast.copy_location(ast.Pass(), first)]
    return tree


def compiled(source: bytes, name: str) -> bytes:
    """Compiles the module and returns the content of its .pyc file. Raises SyntaxError or ValueError."""
    code = compile(without_docstrings(ast.parse(source, name)), name, "exec", dont_inherit=True)
    return MAGIC_NUMBER + _UNCHECKED_HASH + source_hash(source) + marshal.dumps(code)


def main(root: str, *directories: str) -> None:
    """Compiles all modules under the directories. Skips files that this version of Python cannot parse."""
    for file in sorted(file for directory in directories for file in Path(directory).rglob("*.py")):
        target = Path(cache_from_source(str(file)))
        try:
            content = compiled(file.read_bytes(), f"/{file.relative_to(root)}")
        except (SyntaxError, ValueError):
            continue
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)


if __name__ == "__main__":
    # The interpreter omits column numbers (-X no_debug_ranges).
    main(*sys.argv[1:])
