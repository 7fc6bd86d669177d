# SPDX-License-Identifier: Apache-2.0
"""Packages whose ``__init__`` is executed on first use."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from dra_frontend.lazy_packages import add_lazy_packages

NAME = "lazy_package_of_a_test"
INIT = f"""
import sys
from {NAME}.first import one
from {NAME}.second import (
    two,
)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Creates a lazy package with the modules ``first``, ``second`` and ``third``."""
    folder = tmp_path / NAME
    folder.mkdir()
    files = {"__init__": INIT, "first": "one = 1", "second": "two = 2", "third": "three = 3"}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    add_lazy_packages(NAME)
    yield importlib.import_module(NAME)
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def imported() -> set[str]:
    """Returns the package's modules that have been imported."""
    return {name.rpartition(".")[2] for name in sys.modules if name.startswith(f"{NAME}.")}


def test_a_name_imports_only_its_own_module(package: ModuleType) -> None:
    assert imported() == set()
    assert package.one == 1
    assert imported() == {"first"}


def test_a_submodule_is_found(package: ModuleType) -> None:
    assert package.third.three == 3
    assert imported() == {"third"}


def test_any_other_name_executes_the_init(package: ModuleType) -> None:
    assert package.two == 2
    assert imported() == {"first", "second"}
    assert not hasattr(package, "four")


def test_an_init_that_fails_is_executed_again(package: ModuleType, tmp_path: Path) -> None:
    """The file that ``__init__`` reads exists only on the second attempt."""
    data = tmp_path / "data"
    (tmp_path / NAME / "__init__.py").write_text(f"import pathlib\ntwo = pathlib.Path({str(data)!r}).read_text()")
    with pytest.raises(FileNotFoundError):
        package.two  # noqa: B018
    data.write_text("2")
    assert package.two == "2"


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_name_whose_module_is_missing_raises_attribute_error(package: ModuleType, name: str) -> None:
    """The image contains packages from which generated modules have been removed."""
    Path(package.__path__[0], "first.py").unlink()
    importlib.invalidate_caches()
    for _ in range(2):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(package, name)
    assert package.third.three == 3


def test_a_package_that_is_already_imported_is_not_replaced(package: ModuleType) -> None:
    add_lazy_packages(NAME)
    assert sys.modules[NAME] is package


def test_a_package_that_is_not_installed_raises_import_error() -> None:
    with pytest.raises(ImportError, match="no_such_package_of_a_test is not installed"):
        add_lazy_packages("no_such_package_of_a_test")
