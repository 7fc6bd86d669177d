# SPDX-License-Identifier: Apache-2.0
"""Modules that are not executed until they are used."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from numa_node.lazy_modules import add_lazy_modules


def test_a_lazy_module_is_executed_once_when_one_of_its_names_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither importing the module nor the import system's access to package attributes executes it."""
    package = tmp_path / "lazy_example"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('executed').mkdir()\nname = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    add_lazy_modules("lazy_example.part")
    import lazy_example.part as first  # type: ignore[import-not-found]  # noqa: PLC0415
    from lazy_example import part as second  # noqa: PLC0415

    assert first is second
    assert not hasattr(first, "__path__")
    assert not (package / "executed").exists()
    assert (first.name, second.name) == (1, 1)
    assert (package / "executed").exists()
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = first.other


def test_a_thread_waits_while_another_one_executes_a_lazy_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module's names exist only after it has been executed."""
    (tmp_path / "lazy_slow.py").write_text(
        "import lazy_slow, time\nassert not hasattr(lazy_slow, 'name')\ntime.sleep(0.3)\nname = 1\n"
        "def __getattr__(attribute):\n    return attribute\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    add_lazy_modules("lazy_slow")
    import lazy_slow  # type: ignore[import-not-found]  # noqa: PLC0415

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda _: lazy_slow.name, range(3))) == [1, 1, 1]
    assert lazy_slow.other == "other", "it has a function of its own for missing names"


def test_a_lazy_module_that_fails_is_executed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import fails in the same way each time, and the error is the module's own."""
    (tmp_path / "lazy_failing.py").write_text(
        "from pathlib import Path\nname = int(Path(__file__).with_name('content').read_text())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    add_lazy_modules("lazy_failing")
    import lazy_failing  # type: ignore[import-not-found]  # noqa: PLC0415

    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            _ = lazy_failing.name
    (tmp_path / "content").write_text("7")
    assert lazy_failing.name == 7


def test_a_module_that_was_already_imported_is_not_replaced() -> None:
    """Other modules have already imported it and use its names."""
    add_lazy_modules("json")
    assert sys.modules["json"] is json


def test_a_lazy_module_must_exist() -> None:
    """If a library update renames the module, the program fails at startup instead of at first use."""
    with pytest.raises(ImportError):
        add_lazy_modules("json.no_such_module")
