# SPDX-License-Identifier: Apache-2.0
"""Base class of all pydantic models, with pydantic's plugins disabled, and the descriptions of the models' fields.

The description of a field or of an enumeration's member is the docstring below its definition. It is read from the
source code when a JSON schema is generated, so processes that generate no schema do not read it.
"""

import ast
import inspect
import sys
import textwrap
from types import ModuleType

from pydantic import BaseModel

__all__ = ["BaseModel", "as_markdown", "attribute_docs"]


def _exclude_plugins() -> None:
    """Disables pydantic's search for plugins, before the first model is created.

    The search imports importlib.metadata and the archive modules it depends on (1.2 MB), and reads the metadata of all
    distributions. The images contain no plugins, and a plugin could change which documents are valid.
    """
    loader = ModuleType("pydantic.plugin._loader")
    loader.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules.setdefault(loader.__name__, loader)


_exclude_plugins()


def attribute_docs(cls: type) -> dict[str, str]:
    """Returns the docstrings of a class's attributes, including inherited ones, as Markdown, keyed by attribute."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        if one.__module__.partition(".")[0] == __package__:
            found |= _own_docs(one)
    return found


def as_markdown(text: str) -> str:
    """Converts a docstring to Markdown: joins lines into paragraphs, and puts literals in single backticks."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs).replace("``", "`")


def _own_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except OSError:  # an installation without source files
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
