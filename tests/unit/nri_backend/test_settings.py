# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from nri_backend.__main__ import main
from nri_backend.settings import Settings, UsageError, load_settings
from numa_contract import __version__
from numa_contract.config import ConfigError
from numa_node.config_file import DEPRECATED_FLAGS

ENVIRONMENT = {"POD_UID": "4b3d-uid", "NODE_NAME": "worker-1"}


def load(*arguments: str, environment: dict[str, str] | None = None) -> Settings:
    return load_settings(arguments, ENVIRONMENT if environment is None else environment)


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_the_defaults_come_from_the_contract() -> None:
    settings = load()
    assert settings.config.run_dir == "/run/dra-driver-numa"
    assert settings.config.cdi_dir == "/var/run/cdi"
    assert settings.config.nri_socket == "/var/run/nri/nri.sock"
    assert settings.config.cgroup_root == "/sys/fs/cgroup"
    assert settings.plugin_index == "00"
    assert settings.bind == ("", 8081)
    assert settings.state_socket == "/run/dra-driver-numa/4b3d-uid/state.sock"
    assert settings.warnings == ()


def test_a_flag_overrides_one_key_in_the_file(tmp_path: Path) -> None:
    """The file's other keys still apply, and keys that only the frontend uses are accepted."""
    path = file(tmp_path, 'reservedCPUs: "0-1,8"\nrunDir: /run/other\nlogFormat: json\ngroupBy: numanode\n')
    config = load("--config", path, "--run-dir", "/run/flag", "--log-level=warning").config
    assert (config.reserved_cpus, config.log_format) == ({0, 1, 8}, "json")
    assert (config.run_dir, config.log_level) == ("/run/flag", "warning")


def test_flags_from_the_replaced_drivers_override_the_file_with_a_warning(tmp_path: Path) -> None:
    """Manifests written for the replaced drivers therefore keep working. The warning names the key to use instead."""
    path = file(tmp_path, 'reservedCPUs: "0"\n')
    settings = load(
        "--config", path, "--reserved-cpus=2-3", "--cpu-device-mode=grouped", "--cpu-device-group-by=numanode"
    )
    assert settings.config.reserved_cpus == {2, 3}
    assert len(settings.warnings) == 3
    assert "use reservedCPUs in the file" in settings.warnings[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runDir: /a\nrunDir: /b\n", "line 2: the key 'runDir' is given twice"),
        ("reservedMemory:\n- numaNode: 0\n  limits: {memory: 1, memory: 2}\n", "line 3: the key 'memory' is given"),
        ("runDir: [\n", "line 2: "),
        ("? [a, b]\n: c\n", "unhashable key"),
        ("--- {}\n--- {}\n", "document"),
        ("x: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("a: \x00\n", "is not valid YAML"),
        ("a: .inf\n", "is not a JSON number"),
        ("- a\n", "must be a map of settings"),
        ("colour: red\n", "colour: unknown key"),
        ("&a [*a]\n", "an alias refers to a value that contains it"),
    ],
)
def test_the_error_for_an_invalid_file_is_a_single_line_with_its_path(tmp_path: Path, text: str, expected: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load("--config", path)
    assert expected in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    """Covers a missing file, a directory, a file that is not UTF-8, and a file that is too large."""
    with pytest.raises(ConfigError, match="No such file"):
        load("--config", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="Is a directory"):
        load("--config", str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load("--config", str(tmp_path / "binary"))
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="is larger than"):
        load("--config", str(tmp_path / "large"))


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        (["--colour"], UsageError, "unrecognized arguments: --colour"),
        (["--conf", "x"], UsageError, "unrecognized arguments"),
        (["--plugin-index", "7"], UsageError, "must be two digits"),
        (["--reserved-cpus", "3-1"], ConfigError, "command line: reservedCPUs: .*backwards"),
        (["--cpu-device-mode", "magic"], ConfigError, "command line: cpuDeviceMode: "),
        (["--log-format", "xml"], ConfigError, "command line: logFormat: "),
        (["--cdi-dir", "relative"], ConfigError, "command line: cdiDir: must be an absolute path"),
        (["--bind-address", "8081"], ConfigError, "must be HOST:PORT"),
        (["--pod-uid", "../x"], ConfigError, "UID"),
    ],
)
def test_an_invalid_command_line_is_an_error(arguments: list[str], kind: type[ValueError], expected: str) -> None:
    """Covers unknown and abbreviated flags, and invalid values, since flags are checked in the same way as the file."""
    with pytest.raises(kind, match=expected):
        load(*arguments)


def test_the_pod_uid_is_required() -> None:
    """The UID is part of the path to the frontend's socket. The flag overrides the environment."""
    with pytest.raises(ConfigError, match=r"set POD_UID from metadata\.uid"):
        load(environment={})
    assert load("--pod-uid", "mine").pod_uid == "mine"


def test_the_node_name_comes_from_the_environment_or_the_file_or_the_host(tmp_path: Path) -> None:
    """The order of precedence is NODE_NAME, hostnameOverride, and the host's name."""
    path = file(tmp_path, "hostnameOverride: other\n")
    assert load("--config", path).node_name == "worker-1"
    assert load("--config", path, environment={"POD_UID": "u"}).node_name == "other"
    assert load(environment={"POD_UID": "u"}).node_name


def test_help_and_version_are_printed_without_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, expected in (("--help", "setup-runtime"), ("--help", "HOST:PORT|off"), ("--version", __version__)):
        with pytest.raises(SystemExit) as caught:
            load(flag, environment={})
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["version"])
    assert capsys.readouterr().out == f"nri-backend {__version__}\n"


def test_help_names_the_replacement_of_deprecated_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--help", environment={})
    printed = " ".join(capsys.readouterr().out.split())
    for flag, key in DEPRECATED_FLAGS.items():
        assert f"{flag} VALUE deprecated; use {key} in the file" in printed
