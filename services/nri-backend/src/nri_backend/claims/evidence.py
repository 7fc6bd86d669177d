# SPDX-License-Identifier: Apache-2.0
"""Which claims a container holds. Its environment is evidence, the root-owned records are authority.

Rules of this file. A container holds a claim when its environment says so, the claim has a readable record, the record
names the pod, the values are those of the record, and nobody else owns the claim. Whatever else carries our prefixes is
refused; a container is never half believed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from numa_contract.cdi import ClaimFile, request_env
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.names import CPU_DRIVER, CPU_ENV_PREFIX, MEMORY_ENV_PREFIX, ClaimKey, EnvKey, parse_env_key
from numa_contract.records import AllocationRecord, Owner
from numa_contract.reports import ClaimUse

from nri_backend.claims.entitlement import Held, Holding, hold

_PREFIXES = (CPU_ENV_PREFIX, MEMORY_ENV_PREFIX)


class Reason(StrEnum):
    """Why a container is refused; the words are labels of a metric."""

    MALFORMED = "malformed"
    NO_RECORD = "no_record"
    NOT_RESERVED = "not_reserved"
    FORGED = "forged"
    SHARED = "shared"
    NO_POOL = "no_pool"
    OVERLAP = "overlap"
    OFFLINE = "offline"
    KERNEL = "kernel"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a container may not run; the text reaches the pod's events."""

    reason: Reason
    text: str
    unknown: tuple[ClaimUse, ...] = ()
    """The claims in question, if the frontend could still make them known."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable that carries our prefixes."""

    name: str
    value: str
    key: EnvKey


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a container's environment says about claims."""

    variables: tuple[Variable, ...] = ()
    fault: str = ""
    """What is wrong with a variable that only pretends to be ours."""

    @property
    def keys(self) -> frozenset[ClaimKey]:
        """The claims that are named."""
        return frozenset((variable.key.driver, variable.key.uid) for variable in self.variables)

    def uses(self) -> tuple[ClaimUse, ...]:
        """Returns the claims as they are named, one entry for each request, with the CPUs that are named."""
        named: dict[tuple[str, str, str], frozenset[int]] = {}
        for variable in self.variables:
            key = (variable.key.driver, variable.key.uid, variable.key.request or "")
            named[key] = _cpus(variable) or named.get(key, frozenset())
        several = {key[:2] for key in named if key[2]}
        return tuple(
            ClaimUse(uid=uid, driver=driver, requests=(request,) if request else (), cpus=cpus)
            for (driver, uid, request), cpus in named.items()
            if request or (driver, uid) not in several
        )


def _cpus(variable: Variable) -> frozenset[int]:
    try:
        return parse_cpu_list(variable.value) if variable.key.driver == CPU_DRIVER else frozenset()
    except MalformedError:
        return frozenset()


def read_evidence(env: Iterable[str]) -> Evidence:
    """Picks out of a container's environment (``K=V``) what carries our prefixes."""
    found: list[Variable] = []
    for entry in env:
        if entry.startswith(_PREFIXES):
            name, _, value = entry.partition("=")
            try:
                key = parse_env_key(name)
            except MalformedError as error:
                return Evidence(fault=str(error))
            if key is not None:
                found.append(Variable(name, value, key))
    return Evidence(tuple(dict.fromkeys(found)))


def _named(key: ClaimKey, record: AllocationRecord | None = None) -> str:
    return f"{key[0]} claim {record.claim.namespace}/{record.claim.name} ({key[1]})" if record else f"{key[0]} {key[1]}"


def _same(variable: Variable, expected: str) -> bool:
    if variable.value == expected:
        return True
    if variable.key.item not in ("", "NUMANodes"):
        return False
    try:
        return parse_cpu_list(variable.value) == parse_cpu_list(expected)
    except MalformedError:
        return False


def _requests(record: AllocationRecord, variables: Iterable[Variable]) -> tuple[str, ...] | str:
    """Returns the requests that the variables name, or what is wrong with them."""
    expected = {name: (r, value) for r in record.requests for name, value in request_env(record, r).items()}
    unions = [v for v in variables if v.name not in expected and v.key.driver == CPU_DRIVER and v.key.request is None]
    plain = [v for v in variables if v not in unions]
    for variable in plain:
        if variable.name not in expected:
            return f"{variable.name} names a request that the claim does not have"
        if not _same(variable, expected[variable.name][1]):
            return f"{variable.name}={variable.value} is not what the claim was given"
    named = {expected[variable.name][0] for variable in plain}
    seen = {variable.name for variable in plain}
    if lacking := sorted(name for name, (r, _) in expected.items() if r in named and name not in seen):
        return f"{lacking[0]} is missing beside {plain[0].name}"
    for variable in unions:
        # The variable that we add ourselves: it comes back in every later message about the container.
        if not named or not _same(variable, format_cpu_list(record.cpus_of(named))):
            return f"{variable.name}={variable.value} is not the union of the requests that are named beside it"
    return tuple(request for request in record.requests if request in named)


def present_owner(record: AllocationRecord, first: Owner | None) -> Owner | None:
    """Returns who owns a claim: as recorded, else who used it first; nobody once that pod has left reservedFor."""
    return next((owner for owner in (record.owner, first) if owner and record.reserves(owner.pod_uid)), None)


def _assess_claim(
    key: ClaimKey, variables: list[Variable], file: ClaimFile | None, user: Owner, first: Owner | None
) -> Held | Refusal:
    unknown = Evidence(tuple(variables)).uses()
    name, record = variables[0].name, file.record if file else None
    if file is None or record is None:
        why = f"its record cannot be read ({file.problem})" if file else "this node has no record of it"
        text = f"{name} names {_named(key)}, but {why}; name the claim in the pod's spec.resourceClaims instead of \
setting the variable. If it is named there, dra-frontend rebuilds the record and the kubelet retries"
        return Refusal(Reason.NO_RECORD, text, unknown)
    claim = _named(key, record)
    if not record.reserves(user.pod_uid):
        text = f"{claim} is not known to be reserved for this pod (seen in {name}); dra-frontend reads the claim \
again and the kubelet retries. Without a claim of this pod, remove the variable"
        return Refusal(Reason.NOT_RESERVED, text, tuple(u.model_copy(update={"cpus": frozenset()}) for u in unknown))
    requests = _requests(record, variables)
    if isinstance(requests, str):
        text = (
            f"{claim}: {requests}; variables of this name are set by the driver alone, remove them from pod and image"
        )
        return Refusal(Reason.FORGED, text)
    owner = present_owner(record, first)
    allowed = owner is None or owner == user or (record.sharing == "pod" and owner.pod_uid == user.pod_uid)
    if owner is not None and not allowed:
        text = (
            f"{claim} (seen in {name}) belongs to container {owner.container} of pod {owner.pod_uid}; give this \
container a claim of its own"
            + ("" if owner.pod_uid != user.pod_uid else ", or let the claim be shared in the pod")
        )
        return Refusal(Reason.SHARED, text)
    return Held(record, requests)


def assess(
    evidence: Evidence, user: Owner, files: Mapping[ClaimKey, ClaimFile], first_users: Mapping[ClaimKey, Owner]
) -> Holding | Refusal:
    """Tells what a container holds, or why it may not run; without evidence it holds nothing.

    ``user`` is the container's pod UID and name, ``first_users`` who used claims first as far as memory reaches.
    """
    if evidence.fault:
        return Refusal(Reason.MALFORMED, f"{evidence.fault}; remove the variable from pod and image")
    variables: dict[ClaimKey, list[Variable]] = defaultdict(list)
    for variable in evidence.variables:
        variables[variable.key.driver, variable.key.uid].append(variable)
    found = [_assess_claim(k, v, files.get(k), user, first_users.get(k)) for k, v in variables.items()]
    refusals = [result for result in found if isinstance(result, Refusal)]
    if refusals:
        unknown = tuple(use for refusal in refusals for use in refusal.unknown)
        return Refusal(refusals[0].reason, refusals[0].text, unknown)
    return hold(result for result in found if isinstance(result, Held))
