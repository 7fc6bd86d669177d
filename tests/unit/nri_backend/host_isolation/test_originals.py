# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
from nri_backend.host_isolation.originals import OriginalsFile
from nri_backend.host_isolation.plan import OriginalAffinity


def test_the_file_has_the_keys_of_earlier_releases(tmp_path: Path) -> None:
    """While claims are in use, an upgraded or downgraded backend must be able to restore the values that its
    predecessor stored.
    """
    path = tmp_path / "interrupts.json"
    two, three = frozenset({2}), frozenset({3})
    originals = {"25": OriginalAffinity.model_construct(original=two, expected=(two, three))}
    OriginalsFile(str(path)).save(originals)
    assert json.loads(path.read_text()) == {"25": {"former": "2", "known": ["2", "3"]}}
    assert OriginalsFile(str(path)).load() == originals


def test_a_file_replaced_by_another_instance_is_read_again(tmp_path: Path) -> None:
    """The cached content is valid only while the file's inode and modification time stay the same."""
    path = tmp_path / "interrupts.json"
    file = OriginalsFile(str(path))
    path.write_text('{"25": {"former": "2", "known": ["3"]}}')
    assert file.load().keys() == {"25"}
    OriginalsFile(str(path)).save({"26": file.load()["25"]})
    assert file.load().keys() == {"26"}
    file.save({})
    assert not path.exists()
    assert file.load() == {}


@pytest.mark.parametrize("text", ["{]", '{"25": {"former": "2", "known": []}}'])
def test_a_damaged_file_is_an_error_with_a_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "interrupts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"interrupts\.json is damaged; restore .* by hand, then remove it"):
        OriginalsFile(str(path)).load()
