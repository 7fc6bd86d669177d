# SPDX-License-Identifier: Apache-2.0
"""Container runtime settings that the driver requires: their paths, defaults and required values. This module does no
I/O.

Claims reach containers through CDI, and limits through NRI. ``nri-backend setup-runtime`` writes these settings, and
the doctor checks them. :mod:`numa_node.runtimes.containerd` implements how containerd merges its files.
"""

from dataclasses import dataclass
from typing import Any, Final

from numa_contract.names import NRI_PLUGIN_NAME, TOLERATE_MISSING_ANNOTATION

from numa_node.runtimes.containerd import CDI_DIRECTORIES, DUMP_OF_1_7, NRI, NRI_SOCKET, Dump, Release, resolve_var_run

CONTAINERD: Final = "containerd"
CRI_O: Final = "CRI-O"
OLDEST: Final[dict[str, Release]] = {CONTAINERD: (1, 7, 16), CRI_O: (1, 30, 0)}
"""For each runtime, the first release whose NRI has all features that the backend requires."""
VALIDATOR_SINCE: Final[dict[str, Release]] = {CONTAINERD: (2, 2), CRI_O: (1, 34)}
"""For each runtime, the first release with NRI's default validator, which can require plugins."""
MIN_SECONDS: Final = {"plugin_registration_timeout": 5, "plugin_request_timeout": 2}
"""Minimum NRI timeouts, which are the runtimes' defaults (nri/pkg/adaptation). The backend answers hooks within
1.5 s.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a container runtime, with its paths and defaults."""

    name: str
    kind: type
    cri: bool
    """True if the setting is in containerd's CRI section, False if it is in the NRI section."""
    key: tuple[str, ...]
    """Path of the setting within its section of containerd's configuration."""
    former: Any
    """Default in containerd 1.7."""
    default: Any
    """Default in containerd 2 and CRI-O."""
    crio: tuple[str, ...] = ()
    """Path in CRI-O's file under ``[crio]``. If empty, CRI-O always uses the default."""
    is_negative: bool = False
    """True if containerd's key is inverted: its value ``true`` disables the feature."""
    is_negative_in_crio: bool = False

    def path(self, cri: str) -> tuple[str, ...]:
        """Returns the setting's path under ``plugins`` in a dump; ``cri`` is the name of the dump's CRI section."""
        return (cri if self.cri else NRI, *self.key)

    def written(self, value: Any) -> Any:
        """Converts the setting's value to the value of containerd's key."""
        return not value if self.is_negative else value


_VALIDATOR: Final = "default_validator"
SETTINGS: Final = (
    Setting("cdi", bool, True, ("enable_cdi",), False, True),
    Setting(
        "cdi_directories",
        list,
        True,
        ("cdi_spec_dirs",),
        [*CDI_DIRECTORIES],
        [*CDI_DIRECTORIES],
        ("runtime", "cdi_spec_dirs"),
    ),
    Setting("hugetlb", bool, True, ("disable_hugetlb_controller",), False, True, is_negative=True),
    Setting("nri", bool, False, ("disable",), False, True, ("nri", "enable_nri"), is_negative=True),
    Setting(
        "connections",
        bool,
        False,
        ("disable_connections",),
        True,
        True,
        ("nri", "nri_disable_connections"),
        is_negative=True,
        is_negative_in_crio=True,
    ),
    Setting("socket", str, False, ("socket_path",), NRI_SOCKET, NRI_SOCKET, ("nri", "nri_listen")),
    Setting(
        "validator",
        bool,
        False,
        (_VALIDATOR, "enable"),
        False,
        False,
        ("nri", _VALIDATOR, "nri_enable_default_validator"),
    ),
    Setting(
        "required",
        list,
        False,
        (_VALIDATOR, "required_plugins"),
        [],
        [],
        ("nri", _VALIDATOR, "nri_validator_required_plugins"),
    ),
    Setting(
        "tolerated",
        str,
        False,
        (_VALIDATOR, "tolerate_missing_plugins_annotation"),
        "",
        "",
        ("nri", _VALIDATOR, "nri_validator_tolerate_missing_plugins_annotation"),
    ),
)
"""All settings, in the order in which a drop-in lists them."""
NEEDED_SETTINGS: Final = ("cdi", "cdi_directories", "hugetlb", "nri", "connections")
"""Settings without which claims do not reach containers."""
REQUIRE_PLUGIN: Final = ("validator", "required", "tolerated")
"""Settings that prevent containers from starting without the driver, except in annotated pods."""


def required_value(name: str, found: Any, cdi_dir: str) -> Any:
    """Returns the value that a setting must have. If the current value, ``found``, is acceptable, returns it unchanged.

    Missing entries are added to lists, and any socket path is accepted.
    """
    match name:
        case "cdi_directories":
            there = [str(one) for one in found] if isinstance(found, list) else []
            has_it = resolve_var_run(cdi_dir) in map(resolve_var_run, there)
            return found if has_it else [*there, cdi_dir]
        case "required":
            plugins = found if isinstance(found, list) else []
            return found if NRI_PLUGIN_NAME in plugins else [*plugins, NRI_PLUGIN_NAME]
        case "tolerated":
            return TOLERATE_MISSING_ANNOTATION
        case "socket":
            return found
        case _:
            return True


def is_used(setting: Setting, dump: Dump) -> bool:
    """Returns True if the containerd that printed the dump uses the setting: only 1.7 has an option for the hugetlb
    controller.
    """
    return setting.name != "hugetlb" or dump.version == DUMP_OF_1_7
