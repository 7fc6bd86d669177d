# SPDX-License-Identifier: Apache-2.0
import tomllib
from pathlib import Path

import pytest
from nri_backend.__main__ import main

OLD = "version = 2\n# kept\n"


def run(*arguments: object) -> int:
    return main(["setup-runtime", *map(str, arguments)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(OLD)
    return path


def test_it_prints_and_writes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The new file goes to stdout, the changes to stderr, and the old file stays as it is."""
    assert run("--containerd-config", config) == 0
    out, err = capsys.readouterr()
    assert out.startswith(OLD)
    assert len(tomllib.loads(out)["plugins"]) == 2
    assert f'{config}: [plugins."io.containerd.nri.v1.nri"] disable = false (was not said)' in err
    assert config.read_text() == OLD
    assert [one.name for one in config.parent.iterdir()] == ["config.toml"]


def test_it_writes_with_a_backup(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is replaced with its mode; the old one lies beside it under a name that no import matches."""
    config.chmod(0o640)
    assert run("--containerd-config", config, "--write") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "restart containerd when it suits you" in err
    assert tomllib.loads(config.read_text())["plugins"]["io.containerd.grpc.v1.cri"]["enable_cdi"] is True
    (backup,) = set(config.parent.iterdir()) - {config}
    assert (backup.suffix, backup.read_text()) == (".bak", OLD)
    assert [one.stat().st_mode & 0o777 for one in (config, backup)] == [0o640, 0o640]


def test_a_second_time_writes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to change: no second backup."""
    assert run("--containerd-config", config, "--write") == 0
    before = {one: one.stat().st_ino for one in config.parent.iterdir()}
    assert run("--containerd-config", config, "--write") == 0
    assert {one: one.stat().st_ino for one in config.parent.iterdir()} == before
    assert f"{config}: nothing to change" in capsys.readouterr().err


def test_a_link_stays_a_link(config: Path) -> None:
    """Where the configuration is a symbolic link, what it points to is replaced."""
    link = config.with_name("link.toml")
    link.symlink_to(config.name)
    assert run("--containerd-config", link, "--write") == 0
    assert link.is_symlink()
    assert "enable_cdi" in config.read_text()


def test_imports_are_followed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Patterns and relative paths are found beside the file that names them, loops end, and what undoes is named."""
    drop_ins = config.with_name("conf.d")
    drop_ins.mkdir()
    (drop_ins / "b.toml").write_text("version = 2\n[plugins.'io.containerd.nri.v1.nri']\ndisable = true\n")
    (drop_ins / "a.toml").write_text("imports = ['../config.toml']\n")
    config.write_text("version = 2\nimports = ['conf.d/*.toml']\n")
    assert run("--containerd-config", config, "--write") == 1
    assert f"run this command on {drop_ins}/b.toml too" in capsys.readouterr().err
    assert config.read_text() == "version = 2\nimports = ['conf.d/*.toml']\n"
    assert run("--containerd-config", drop_ins / "b.toml", "--write") == 0
    assert run("--containerd-config", config, "--write") == 0


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "containerd config default"), (b"\xff", "is no TOML"), (b"version = 1", "migrate")]
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, content: bytes | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file, one that is no text and one of the old format are refused, with a remedy."""
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_bytes(content)
    assert run("--containerd-config", path) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(path) in err
    assert expected in err


def test_line_ends_stay(config: Path) -> None:
    """A file with the line ends of another system keeps them."""
    config.write_bytes(b"version = 2\r\n")
    assert run("--containerd-config", config, "--write") == 0
    data = config.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n") > 3


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The service's own help leads to it."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "setup-runtime" in capsys.readouterr().out
