# SPDX-License-Identifier: Apache-2.0
"""The check that limits a class's fields counts the attributes that the class's instances store."""

from pathlib import Path

from hack.code_size import MAX_FIELDS, overloaded

_NAMES = [f"field_{number}" for number in range(MAX_FIELDS)]


def _reported(tmp_path: Path, source: str) -> list[str]:
    (tmp_path / "module.py").write_text(source)
    return [text.rpartition(": ")[2] for text in overloaded(tmp_path)]


def test_names_that_a_dataclass_declares_are_fields(tmp_path: Path) -> None:
    """A class constant does not count."""
    body = "".join(f"    {name}: int\n" for name in _NAMES)
    assert not _reported(tmp_path, f"class One:\n    LIMIT: ClassVar[int] = 1\n{body}")
    assert _reported(tmp_path, f"class One:\n{body}    more: int = 0\n") == ["One has 13 fields, at most 12"]


def test_names_that_methods_assign_are_fields(tmp_path: Path) -> None:
    """Reading an attribute does not count, and neither does assigning the same attribute again."""
    body = "".join(f"        self.{name} = 0\n" for name in _NAMES)
    first = f"class One:\n    def __init__(self):\n{body}"
    assert not _reported(tmp_path, f"{first}    def set(self):\n        self.field_0 = self.other\n")
    reported = _reported(tmp_path, f"{first}    async def set(self):\n        self.other: int = 1\n")
    assert reported == ["One has 13 fields, at most 12"]


def test_fields_inherited_from_a_base_class_are_included(tmp_path: Path) -> None:
    """Otherwise, a class could evade the limit by being split into a base class and a subclass."""
    body = "".join(f"    {name}: int\n" for name in _NAMES)
    source = f"class Base:\n{body}class One(Base):\n    field_0: int\n    more: int\n"
    assert _reported(tmp_path, source) == ["One has 13 fields, at most 12"]
