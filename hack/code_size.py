# SPDX-License-Identifier: Apache-2.0
"""Checks that packages and classes are small enough to be understood as a whole. No package in the product has more
than MAX_MODULES modules, and no class in the backend more than MAX_FIELDS fields.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

MAX_MODULES: Final = 12
MAX_FIELDS: Final = 12
SOURCES: Final = ("shared/src", "services/dra-frontend/src", "services/nri-backend/src", "services/kubectl-numa/src")
BACKEND: Final = "services/nri-backend/src/nri_backend"
_NO_FIELDS: Final = ("ClassVar", "Final")
"""A name in a class body with one of these annotations is not an instance field."""


def crowded(root: Path) -> list[str]:
    """Returns a message for each package that is too large. Generated code is not counted."""
    packages = [init.parent for source in SOURCES for init in sorted((root / source).rglob("__init__.py"))]
    sizes = {one: sum(not module.name.startswith("__") for module in one.glob("*.py")) for one in packages}
    return [f"{one}: {size} modules, at most {MAX_MODULES}" for one, size in sizes.items() if size > MAX_MODULES]


def overloaded(directory: Path) -> list[str]:
    """Returns a message for each class with too many fields in the files under a directory. Generated code is left out.

    The fields of base classes in the same directory are included.
    """
    paths = [path for path in sorted(directory.rglob("*.py")) if path.parent.name != "_pb"]
    trees = [(path, ast.parse(path.read_text())) for path in paths]
    found = [(path, one) for path, tree in trees for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
    classes = {one.name: one for _, one in found}
    sizes = [(path, one.name, len(_with_inherited(one, classes))) for path, one in found]
    return [
        f"{path}: {name} has {size} fields, at most {MAX_FIELDS}" for path, name, size in sizes if size > MAX_FIELDS
    ]


def _with_inherited(one: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    bases = [classes[base.id] for base in one.bases if isinstance(base, ast.Name) and base.id in classes]
    return set(fields(one)).union(*(_with_inherited(base, classes) for base in bases if base is not one))


def fields(one: ast.ClassDef) -> Iterator[str]:
    """Yields the fields of a class: the annotated names in its body, and the attributes that its methods assign to
    ``self``.
    """
    for statement in one.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if not any(isinstance(part, ast.Name) and part.id in _NO_FIELDS for part in ast.walk(annotation)):
                    yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in ast.walk(statement):
                    match part:
                        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                            yield name
                        case _:
                            pass
            case _:
                pass


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.exit("\n".join(crowded(root) + overloaded(root / BACKEND)) or 0)
