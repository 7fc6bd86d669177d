# SPDX-License-Identifier: Apache-2.0
"""Descriptions of fields and enumeration members: the docstrings below their definitions.

They are read from the source when a JSON schema is made. A process that makes none reads no source.
"""

import ast
import inspect
import textwrap


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
