# SPDX-License-Identifier: Apache-2.0
"""The drop-in of ``nri-backend setup-runtime`` and the doctor agree on the settings that the driver needs in
containerd.
"""

import copy
import tomllib

import pytest
from nri_backend.setup.containerd import missing_settings, write_drop_in
from numa_node.runtimes.containerd import read_dump
from numa_node.runtimes.settings import NEEDED_SETTINGS, REQUIRE_PLUGIN, required_value
from numa_tools.doctor.runtime_settings import printed_settings

from tests.fakes.containerd_dump import Document, dump, merge
from tests.rigs.containerd_files import toml_text

DIRECTORY = "/srv/cdi"
OFF: tuple[Document, Document] = (
    {"disable": True, "disable_connections": True, "plugin_request_timeout": "1s"},
    {"enable_cdi": False, "cdi_spec_dirs": [], "disable_hugetlb_controller": True},
)


def lacking(document: Document) -> set[str]:
    """Returns the settings that the doctor would report as wrong in containerd's output."""
    _, settings, _ = printed_settings(toml_text(document))
    names = (*NEEDED_SETTINGS, *REQUIRE_PLUGIN)
    return {name for name in names if settings[name] != required_value(name, settings[name], DIRECTORY)}


@pytest.mark.parametrize("release", ["1.7", "2.0", "2.1", "2.2", "2.3"])
def test_the_doctor_finds_no_missing_setting_after_the_drop_in_is_merged(release: str) -> None:
    """The doctor reports each missing setting. Once the drop-in has been merged as the containerd release merges it, no
    setting is missing, except for those of the NRI validator, which releases before 2.2 do not have.
    """
    before = dump(release, *OFF)
    validating = release in ("2.2", "2.3")
    hugetlb = {"hugetlb"} if release == "1.7" else set()
    assert lacking(before) == {"cdi", "cdi_directories", "nri", "connections", *REQUIRE_PLUGIN} | hugetlb
    parsed = read_dump(toml_text(before))
    drop_in = write_drop_in(parsed, missing_settings(parsed, DIRECTORY, require_plugin=True))
    after = merge(release, copy.deepcopy(before), tomllib.loads(drop_in))
    assert lacking(after) == (set() if validating else set(REQUIRE_PLUGIN))
