# SPDX-License-Identifier: Apache-2.0
"""What a runtime has stored, against what it should have stored."""

import pytest
from nri_backend.containers.container import tracked_as
from nri_backend.containers.stored import stored_updates
from nri_backend.nri.model import Resources

from tests.rigs.claims import container, pod


@pytest.mark.parametrize(
    ("stored", "eager", "lazy"),
    [
        ("1-4", "", ""),
        ("2", "1-4", ""),
        ("0-2", "1-4", "1-2"),
        ("6-7", "1-4", "1-4"),
        ("", "1-4", "1-4"),
        ("odd", "1-4", "1-4"),
    ],
)
def test_what_a_member_of_the_pool_has_stored(stored: str, eager: str, lazy: str) -> None:
    """The pool; with a lazy one what is stored of it, since the runtime writes what it stores."""
    one = container("c", cpus=stored)
    compared = [(one, tracked_as(pod(), one), Resources(cpus="1-4"))]
    assert [update.resources.cpus for update in stored_updates(compared)] == ([eager] if eager else [])
    assert [update.resources.cpus for update in stored_updates(compared, lazy=True)] == ([lazy] if lazy else [])
