# SPDX-License-Identifier: Apache-2.0
"""What a container's environment says about claims. A pod's author writes there: it is evidence, never authority."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from numa_contract.errors import MalformedError
from numa_contract.names import ClaimKey, EnvKey, parse_env_key
from numa_contract.reports import ClaimUse

from nri_backend.nri.model import MAX_VARIABLE_BYTES, MAX_VARIABLES

MAX_CLAIMS: Final = 64
"""Claims of ours that a container may name."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable that carries our prefixes."""

    name: str
    value: str
    """Only ever compared, never expanded."""
    key: EnvKey


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a container's environment says about claims."""

    claims: Mapping[ClaimKey, tuple[Variable, ...]] = field(default_factory=dict)
    """The variables by the claim that they name."""
    fault: str = ""
    """What is wrong with variables that only pretend to be ours."""


def read_evidence(env: Sequence[str]) -> Evidence:
    """Reads the variables of ours in a container's environment (``K=V``), as messages.py picks them out."""
    if len(env) > MAX_VARIABLES or sum(map(len, env)) > MAX_VARIABLE_BYTES:
        limits = f"more than {MAX_VARIABLES} variables or {MAX_VARIABLE_BYTES >> 10} KiB"
        return Evidence(fault=f"its environment has {limits} with the driver's prefixes")
    found: dict[ClaimKey, dict[Variable, None]] = defaultdict(dict)
    for entry in env:
        name, _, value = entry.partition("=")
        try:
            key = parse_env_key(name)
        except MalformedError as error:
            return Evidence(fault=str(error))
        if key is not None:
            found[key.driver, key.uid][Variable(name, value, key)] = None
    if len(found) > MAX_CLAIMS:
        return Evidence(fault=f"its environment names more than {MAX_CLAIMS} claims of the driver")
    return Evidence({claim: tuple(variables) for claim, variables in found.items()})


def use(claim: ClaimKey, variables: Sequence[Variable]) -> ClaimUse:
    """Returns a claim as it is named, with the requests in the order of the variables."""
    requests = dict.fromkeys(variable.key.request for variable in variables if variable.key.request)
    return ClaimUse(uid=claim[1], driver=claim[0], requests=tuple(requests))
