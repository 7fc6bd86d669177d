# SPDX-License-Identifier: Apache-2.0
"""The base of all models: pydantic without plugins, shared sets of field names, and descriptions from docstrings.

A node has thousands of instances: five for each claim and one or more for each container, in both processes. Therefore
equal parts of them are stored once.

The description of a field or of an enumeration's member is the docstring below its definition. It is read from the
source when a JSON schema is made; a process that makes no schema does not read it.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, Final, Self

from pydantic import BaseModel

_REMEMBERED: Final = 1024
"""Maximum number of sets that are remembered. Each model has few combinations of fields that occur."""


def _exclude_plugins() -> None:
    """Replaces pydantic's search for plugins, before the first model is created.

    The search imports importlib.metadata with its archives (1.2 MB) and reads the metadata of all distributions. The
    images contain no plugin, and a plugin could change which documents are valid.
    """
    loader = ModuleType("pydantic.plugin._loader")
    loader.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules.setdefault(loader.__name__, loader)


_exclude_plugins()


@lru_cache(_REMEMBERED)
def _shared_fields(given: frozenset[str]) -> set[str]:
    return set(given)


def _share_fields(model: BaseModel) -> None:
    if model.model_extra:  # Names of unknown fields are chosen by the document's author, so such sets are not cached.
        return
    object.__setattr__(model, "__pydantic_fields_set__", _shared_fields(frozenset(model.model_fields_set)))


class Model(BaseModel):
    """A model whose instances share the set of the fields that were given (``model_fields_set``).

    pydantic creates a set of 216 to 728 bytes for each instance. Sharing it is safe, since only an assignment to a
    field changes it and the models of the contract are frozen.
    """

    def model_post_init(self, _context: Any, /) -> None:
        """Shares the set of the fields that were given."""
        _share_fields(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy, with changes that are not validated."""
        copied = super().model_copy(update=update, deep=deep)
        _share_fields(copied)
        return copied


def attribute_docs(cls: type) -> dict[str, str]:
    """Returns the docstrings of a class's attributes by name, inherited ones included. Markup is that of Markdown."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        if one.__module__.partition(".")[0] == __package__:
            found |= _own_docs(one)
    return found


def as_markdown(text: str) -> str:
    """Returns a docstring as Markdown: lines joined to paragraphs, literals in single backticks."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs).replace("``", "`")


def _own_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except OSError:  # an installation without sources
        return {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {name: as_markdown(text) for name, text in map(_documented, body, body[1:]) if name}


def _documented(statement: ast.stmt, following: ast.stmt) -> tuple[str, str]:
    """Returns the attribute that a statement defines and the docstring that follows it, or two empty strings."""
    match statement, following:
        case (
            ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
            ast.Expr(value=ast.Constant(value=str(text))),
        ):
            return name, text
    return "", ""
