# SPDX-License-Identifier: Apache-2.0
"""The output of ``containerd config dump`` for each release, with the keys that matter to drivers, and some other
keys.
"""

from typing import Any

NRI = "io.containerd.nri.v1.nri"
CRI_2 = "io.containerd.grpc.v1.cri"
CRI_3 = "io.containerd.cri.v1.runtime"
CDI_DIRECTORIES = ["/etc/cdi", "/var/run/cdi"]

Document = dict[str, Any]


def nri(**settings: Any) -> Document:
    """Returns the NRI section with the defaults that it has had since 2.0."""
    return {
        "disable": False,
        "socket_path": "/var/run/nri/nri.sock",
        "plugin_path": "/opt/nri/plugins",
        "plugin_config_path": "/etc/nri/conf.d",
        "plugin_registration_timeout": "5s",
        "plugin_request_timeout": "2s",
        "disable_connections": False,
        **settings,
    }


def cri(**settings: Any) -> Document:
    """Returns the section with the CDI settings, with the defaults that it has had since 2.0. The section contains
    tables, some with dots in their names.
    """
    return {
        "enable_cdi": True,
        "cdi_spec_dirs": CDI_DIRECTORIES,
        "disable_hugetlb_controller": True,
        "sandbox_image": 'registry.example/pause:"3"',
        "containerd": {
            "default_runtime_name": "runc",
            "runtimes": {"runc": {"runtime_type": "io.containerd.runc.v2", "options": {"SystemdCgroup": True}}},
        },
        "registry": {"mirrors": {"docker.io": {"endpoint": ["https://mirror.example"]}}, "configs": {}},
        **settings,
    }


def dump(release: str, nri_settings: Document | None = None, cri_settings: Document | None = None) -> Document:
    """Returns the dump that a release prints without a configuration file, with the given settings changed."""
    validator = {"enable": False, "reject_oci_hook_adjustment": False, "required_plugins": []}
    validator["tolerate_missing_plugins_annotation"] = ""
    version, name, nri_section, cri_section = {
        "1.7": (2, CRI_2, nri(disable=True), cri(enable_cdi=False)),
        "2.0": (3, CRI_3, nri(), cri()),
        "2.1": (3, CRI_3, nri(), cri()),
        "2.2": (3, CRI_3, nri(default_validator=validator), cri()),
        "2.3": (4, CRI_3, nri(default_validator=validator), cri()),
    }[release]
    return {
        "version": version,
        "root": "/var/lib/containerd",
        "imports": [],
        "disabled_plugins": [],
        "plugins": {
            name: cri_section | (cri_settings or {}),
            NRI: nri_section | (nri_settings or {}),
            "io.containerd.gc.v1.scheduler": {"mutation_threshold": 100, "startup_delay": "100ms"},
        },
    }


def merge(release: str, into: Document, drop_in: Document) -> Document:
    """Returns the settings that the release uses when it imports the drop-in: 1.7 replaces whole sections, and 2.0 and
    later replace individual keys.
    """
    if release == "1.7":
        return into | {"plugins": into["plugins"] | drop_in["plugins"]}
    return {key: _deep(value, drop_in[key]) if key in drop_in else value for key, value in into.items()}


def _deep(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _deep(old.get(key), value) for key, value in new.items()}
