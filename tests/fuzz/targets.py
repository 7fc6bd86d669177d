# SPDX-License-Identifier: Apache-2.0
"""Every parser of hostile input. A new parser is one more row in the table of its service."""

from typing import Final

from tests.fuzz import backend_targets, contract_targets, frontend_targets
from tests.fuzz.target import Target

TARGETS: Final[tuple[Target, ...]] = (
    *contract_targets.TARGETS,
    *frontend_targets.TARGETS,
    *backend_targets.TARGETS,
)
