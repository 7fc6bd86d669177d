# SPDX-License-Identifier: Apache-2.0
"""Authorizes the use of claims. A container's environment is evidence; only the root-owned records are authoritative.

CDI sets environment variables that name the claim and its requests, but the author of a pod or an image can set the
same variables. Therefore a container holds a claim only if all of this is true: a variable names the claim, the claim
has a readable record, the record reserves the claim for the pod, the values of the variables equal those of the record,
and no other container owns the claim. Two containers of one pod may use a claim whose record has ``sharing: pod``.

Each claim is checked on its own: a rejected claim does not change the result for the others. A rejected claim that has
already been enforced for the container stays in its entitlement while the container runs, since its processes may rely
on the CPUs and pages. The container is then an orphan for this claim.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from numa_contract.cdi import ClaimFile, request_env
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import MalformedError, shown
from numa_contract.names import CPU_DRIVER, ClaimKey, EnvKey, parse_env_key
from numa_contract.records import AllocationRecord, Owner
from numa_contract.reports import ClaimUse

from nri_backend.claims.entitlement import NOTHING, Entitlement, Held, entitlement_from
from nri_backend.nri.model import MAX_VARIABLE_BYTES, MAX_VARIABLES

MAX_CLAIMS: Final = 64
"""Maximum number of this driver's claims that a container may name."""
_PODS_SHOWN: Final = 3
"""Maximum number of pods that a rejection names."""


class Variable(NamedTuple):
    """An environment variable with a prefix of this driver."""

    name: str
    value: str
    """The value as it was set. It is only compared with the record, never interpreted."""
    key: EnvKey


@dataclass(frozen=True, slots=True)
class Evidence:
    """The claims that a container's environment names. Not trusted: the author of the pod can set any variable."""

    claims: Mapping[ClaimKey, tuple[Variable, ...]] = field(default_factory=dict)
    """Variables by the claim that they name."""
    fault: str = ""
    """Reason why variables with the driver's prefixes cannot be parsed or are too many; empty if all are valid."""


class Reason(StrEnum):
    """Category of a rejection; the values are labels of a metric."""

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
    UNENFORCED = "unenforced"


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why a container must not be created or started; the text appears in the pod's events."""

    reason: Reason
    text: str
    unknown: tuple[ClaimUse, ...] = ()
    """Rejected claims whose record the frontend may still write or update."""
    about: tuple[ClaimUse, ...] = ()
    """Every claim that the container names and may not use."""


def _anybody(_: Owner) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of the node and their users, as the state contains them."""

    files: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    first_users: Mapping[ClaimKey, Owner] = field(default_factory=dict)
    """The container that was the first to use a claim, as far as this instance knows."""
    lives: Callable[[Owner], bool] = _anybody
    """Predicate: True if a container of this name is alive in the pod."""

    def owner(self, record: AllocationRecord, user: Owner) -> Owner | None:
        """Returns the owner of a claim for a user: the recorded owner, else the first user, else None.

        An owner loses the claim when its pod is removed from reservedFor. An owner in the user's own pod also loses it
        when its container has ended, as an init container does.
        """
        for owner in (record.owner, self.first_users.get((record.driver, record.claim.uid))):
            if owner and record.reserves(owner.pod_uid) and (owner.pod_uid != user.pod_uid or self.lives(owner)):
                return owner
        return None


def read_evidence(env: Sequence[str]) -> Evidence:
    """Parses the variables (``K=V``) that nri/messages.py has selected from an environment by their prefix."""
    if len(env) > MAX_VARIABLES or sum(map(len, env)) > MAX_VARIABLE_BYTES:
        limits = f"more than {MAX_VARIABLES} variables or {MAX_VARIABLE_BYTES >> 10} KiB"
        return Evidence(fault=f"its environment has {limits} with the driver's prefixes")
    found: dict[ClaimKey, dict[str, Variable]] = defaultdict(dict)
    for entry in env:
        name, _, value = entry.partition("=")
        try:
            key = parse_env_key(name)
        except MalformedError as error:
            return Evidence(fault=str(error))
        if key is not None:
            found[key.driver, key.uid][entry] = Variable(name, value, key)
    if len(found) > MAX_CLAIMS:
        return Evidence(fault=f"its environment names more than {MAX_CLAIMS} claims of the driver")
    return Evidence({claim: tuple(variables.values()) for claim, variables in found.items()})


def authorize(
    evidence: Evidence, user: Owner, claims: Claims, proven: Sequence[Held] = ()
) -> tuple[Entitlement, tuple[ClaimUse, ...], Rejection | None]:
    """Returns a container's entitlement, the claims in it that no record allows any more, and the rejection of others.

    The rejection is None if every claim that the environment names may be used. ``proven`` contains the claims that
    have been enforced for the container since its start; these stay in the entitlement if they are rejected now.
    """
    found = {key: _judge(key, variables, user, claims) for key, variables in evidence.claims.items()}
    held = [result for result in found.values() if isinstance(result, Held)]
    refused = {key: result for key, result in found.items() if isinstance(result, Rejection)}
    if evidence.fault:
        refused["", ""] = Rejection(Reason.MALFORMED, f"{evidence.fault}; remove the variables from pod and image")
    if not refused:
        return entitlement_from(held) if held else NOTHING, (), None
    kept = [one for one in proven if one.key in refused or evidence.fault]
    lost = {one.key for one in kept}
    unknown = tuple(one for key, rejection in refused.items() if key not in lost for one in rejection.unknown)
    about = tuple(
        rejection.unknown[0] if rejection.unknown else use(key, evidence.claims[key])
        for key, rejection in refused.items()
        if key in evidence.claims
    )
    first = next(iter(refused.values()))
    return entitlement_from([*held, *kept]), tuple(map(_use, kept)), Rejection(first.reason, first.text, unknown, about)


def _judge(key: ClaimKey, variables: Sequence[Variable], user: Owner, claims: Claims) -> Held | Rejection:
    file = claims.files.get(key)
    name, record = variables[0].name, file.record if file else None
    if file is None or record is None:
        why = f"its record cannot be read ({file.problem})" if file else "this node has no record of it"
        return _no_record(key, variables, why)
    try:
        result = _checked(record, name, variables, user, claims)
        if isinstance(result, Held):
            entitlement_from([result])
    except Exception as error:  # noqa: BLE001  an unusable record must not affect other claims
        return _no_record(key, variables, f"its record cannot be used ({type(error).__name__}: {shown(error)})")
    return result


def _no_record(key: ClaimKey, variables: Sequence[Variable], why: str) -> Rejection:
    text = f"{shown(variables[0].name)} names {key[0]} {key[1]}, but {why}; name the claim in the pod's \
spec.resourceClaims instead of setting the variable. If it is named there, dra-frontend rebuilds the record and the \
kubelet retries"
    return Rejection(Reason.NO_RECORD, text, (use(key, variables),))


def use(claim: ClaimKey, variables: Sequence[Variable]) -> ClaimUse:
    """Returns the use of a claim that variables name, with its requests in the order of the variables."""
    requests = dict.fromkeys(variable.key.request for variable in variables if variable.key.request)
    return ClaimUse(uid=claim[1], driver=claim[0], requests=tuple(requests))


def _checked(
    record: AllocationRecord, name: str, variables: Sequence[Variable], user: Owner, claims: Claims
) -> Held | Rejection:
    claim = f"{record.driver} claim {record.claim.namespace}/{record.claim.name} ({record.claim.uid})"
    if not record.reserves(user.pod_uid):
        return _not_reserved(record, claim, name, variables)
    requests = _requests(record, variables)
    if isinstance(requests, str):
        remedy = "variables of this name are set by the driver alone, remove them from pod and image"
        return Rejection(Reason.FORGED, f"{claim}: {requests}; {remedy}")
    owner = claims.owner(record, user)
    if owner is None or owner == user or (record.sharing == "pod" and owner.pod_uid == user.pod_uid):
        return Held(record, requests)
    return _owned(record, claim, owner, user)


def _not_reserved(record: AllocationRecord, claim: str, name: str, variables: Sequence[Variable]) -> Rejection:
    """Returns the rejection of a pod that the record does not reserve the claim for.

    Either the claim has been reserved for another pod since the record was written, or the variable is forged.
    """
    text = f"{claim} is recorded for {_pods(record)} and not for this pod (seen in {name}). If the pod names the claim \
in spec.resourceClaims, dra-frontend now reads from the API server which pods it is reserved for, and the kubelet's \
next attempt is decided by the answer. If it does not, remove the variable from pod and image"
    return Rejection(Reason.NOT_RESERVED, text, (use((record.driver, record.claim.uid), variables),))


def _pods(record: AllocationRecord) -> str:
    names = [f"{record.claim.namespace}/{pod.name}" for pod in record.reserved_for]
    if not names:
        return "no pod"
    more = f" and {len(names) - _PODS_SHOWN} more" if len(names) > _PODS_SHOWN else ""
    return f"pod{'s' if names[1:] else ''} {', '.join(names[:_PODS_SHOWN])}{more}"


def _owned(record: AllocationRecord, claim: str, owner: Owner, user: Owner) -> Rejection:
    """Returns the rejection of a container whose claim belongs to another container."""
    # Claims.owner() returns an owner only if reservedFor contains its pod, so the pod's name is known.
    pods = {pod.uid: f"{record.claim.namespace}/{pod.name}" for pod in record.reserved_for}
    text = f"{claim} belongs to container {owner.container} of pod {pods.get(owner.pod_uid, owner.pod_uid)}"
    if owner.pod_uid == user.pod_uid:
        remedy = "give this container a claim of its own, let the claim be shared in the pod (sharing: pod), or let an \
init container end before this one uses it"
        return Rejection(Reason.SHARED, f"{text} while that one lives; {remedy}")
    remedy = "give this pod a claim of its own, as resourceClaimTemplateName does, or delete that pod"
    return Rejection(Reason.SHARED, f"{text}, and pods cannot share it; {remedy}")


def _requests(record: AllocationRecord, variables: Sequence[Variable]) -> tuple[str, ...] | str:
    """Returns the requests that the variables name, or an error text if a variable does not match the record."""
    expected = {name: (r, value) for r in record.requests for name, value in request_env(record, r).items()}
    seen: set[str] = set()
    unions: list[Variable] = []
    for variable in variables:
        name = variable.name
        if name in expected:
            if variable.value != expected[name][1]:
                return f"{name}={shown(variable.value)} is not what the claim was given"
            seen.add(name)
        elif variable.key.driver == CPU_DRIVER and variable.key.request is None:
            unions.append(variable)
        else:
            return f"{name} names a request that the claim does not have"
    named = {expected[name][0] for name in seen}
    if lacking := sorted(name for name, (r, _) in expected.items() if r in named and name not in seen):
        return f"{lacking[0]} is missing beside {variables[0].name}"
    # The backend adds this variable to containers with several requests (Entitlement.env), so it is in every later
    # message of the runtime about the container.
    union = format_cpu_list(record.cpus_of(named))
    if any(not named or variable.value != union for variable in unions):
        return f"{unions[0].name}={shown(unions[0].value)} is not the union of the requests that are named beside it"
    return tuple(request for request in record.requests if request in named)


def _use(held: Held) -> ClaimUse:
    record = held.record
    cpus = record.cpus_of(held.requests)
    return ClaimUse(uid=record.claim.uid, driver=record.driver, requests=held.requests, cpus=cpus)
