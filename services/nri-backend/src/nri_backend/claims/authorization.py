# SPDX-License-Identifier: Apache-2.0
"""Authorizes the use of claims. A container's environment is merely evidence; only the root-owned records are
authoritative.

CDI sets environment variables that name the claim and its requests, but the author of a pod or an image can set the
same variables. Therefore a container holds a claim only if all of these conditions are met: a variable names the claim,
the claim has a readable record, the record reserves the claim for the pod, the variables have the values that the
record requires, and no other container owns the claim. Containers in the same pod may use the same claim if its record
has ``sharing: pod``.

Each claim is checked independently: a rejected claim does not affect the container's other claims. A rejected claim
that has already been enforced for the container stays in its entitlement while the container runs, since its processes
may rely on the CPUs and pages. The container is then an orphan with respect to this claim.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from numa_contract.backend_codes import BackendCode
from numa_contract.cdi import ClaimFile, request_env
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import MalformedError, shown
from numa_contract.names import CPU_DRIVER, ClaimKey, EnvKey, parse_env_key
from numa_contract.records import AllocationRecord, Owner
from numa_contract.reports import ClaimUse

from nri_backend.claims.entitlement import NO_ENTITLEMENT, Entitlement, HeldClaim, entitlement_from
from nri_backend.nri.model import MAX_VARIABLE_BYTES, MAX_VARIABLES
from nri_backend.problems import Problem

MAX_CLAIMS: Final = 64
"""Maximum number of this driver's claims that a container may name."""
_PODS_SHOWN: Final = 3
"""Maximum number of pods that a rejection message names."""


class Variable(NamedTuple):
    """An environment variable with one of this driver's prefixes."""

    name: str
    value: str
    """Value as set in the container. It is only compared with the record, never interpreted."""
    key: EnvKey


@dataclass(frozen=True, slots=True)
class Evidence:
    """The claims that a container's environment names. They are not trusted, since the pod's author can set any
    variable.
    """

    claims: Mapping[ClaimKey, tuple[Variable, ...]] = field(default_factory=dict)
    """Environment variables, keyed by the claim that they name."""
    fault: str = ""
    """Reason why the variables with the driver's prefixes were rejected as a whole: one cannot be parsed, or there are
    too many. Empty if they are valid.
    """


class Reason(StrEnum):
    """Category of a rejection. The values are used as a metric label."""

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
    OBSERVE = "observe"


_CODES: Final = {
    Reason.MALFORMED: BackendCode.VARIABLES_MALFORMED,
    Reason.NO_RECORD: BackendCode.CLAIM_NOT_RECORDED,
    Reason.NOT_RESERVED: BackendCode.CLAIM_NOT_RESERVED,
    Reason.FORGED: BackendCode.VARIABLES_FORGED,
    Reason.SHARED: BackendCode.CLAIM_IN_USE,
    Reason.NO_POOL: BackendCode.NO_SHARED_CPUS,
    Reason.OVERLAP: BackendCode.CLAIMED_CPUS_OCCUPIED,
    Reason.OFFLINE: BackendCode.CLAIMED_CPUS_OFFLINE,
    Reason.KERNEL: BackendCode.SETTINGS_NOT_APPLIED,
    Reason.UNSUPPORTED: BackendCode.CLAIM_UNSUPPORTED,
    Reason.UNENFORCED: BackendCode.NOT_ENFORCED,
    Reason.OBSERVE: BackendCode.NODE_OBSERVES,
}
"""Code for each rejection reason, used if the rejection's ``cause`` is None."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why a container must not be created or started; the message appears in the pod's events."""

    reason: Reason
    text: str
    unknown_claims: tuple[ClaimUse, ...] = ()
    """Rejected claims whose record the frontend may still write or update."""
    claims: tuple[ClaimUse, ...] = ()
    """All claims that the container names but may not use."""
    cause: BackendCode | None = None
    """Code of the problem that caused the rejection. If it is None, ``reason`` determines the code."""
    text_if_running: str = ""
    """Message for a container that was already running when its claims were rejected; empty if ``text`` applies to it
    too.
    """

    def problem(self, *, running: bool = False) -> Problem:
        """Returns the rejection as a problem.

        The message is ``text_if_running`` if that is set and ``running`` is true; otherwise it is ``text``. The code is
        ``cause`` or, if ``cause`` is None, the code for ``reason``.
        """
        text = self.text_if_running if running else ""
        return Problem(text or self.text, self.cause or _CODES[self.reason])


class Claims:
    """The node's claims and their users."""

    def __init__(
        self,
        files: Mapping[ClaimKey, ClaimFile] = MappingProxyType({}),
        first_users: Mapping[ClaimKey, Owner] = MappingProxyType({}),
        is_alive: Callable[[Owner], bool] = lambda _: True,
    ) -> None:
        """``is_alive`` returns True if the pod of the given owner has a live container with the owner's name."""
        self.files: Mapping[ClaimKey, ClaimFile] = {}
        self.known: dict[ClaimKey, HeldClaim | str] = {}
        """For each claim, the claim with all of its requests, or the reason why no container can hold it."""
        self.first_users = dict(first_users)
        """For each claim, the first container that is known to have used it."""
        self._is_alive = is_alive
        self._set_files(files)

    def _set_files(self, files: Mapping[ClaimKey, ClaimFile]) -> set[ClaimKey]:
        """Sets the current claim files and returns the claims that have changed.

        A file that has not changed must be passed as the same object as in the previous call. The shares of changed
        claims are computed here, so that hooks need not compute them.
        """
        before, known = self.files, self.known
        changed = {key for key in before.keys() | files.keys() if before.get(key) is not files.get(key)}
        self.known = {key: _with_all_requests(file) if key in changed else known[key] for key, file in files.items()}
        self.files = files
        return changed

    def owner(self, held: HeldClaim, user: Owner) -> Owner | None:
        """Returns the current owner of a claim that ``user`` wants to use: the recorded owner, otherwise the claim's
        first user, otherwise None.

        Two kinds of owners are ignored: a container whose pod has been removed from reservedFor, and a container in the
        user's own pod that has exited, such as an init container.
        """
        for owner in (held.record.owner, self.first_users.get(held.key)):
            if owner is None or owner.pod_uid not in held.share.pods:
                continue
            if owner.pod_uid != user.pod_uid or self._is_alive(owner):
                return owner
        return None


def _with_all_requests(file: ClaimFile) -> HeldClaim | str:
    """Returns a claim with all its requests, or the reason why no container can hold it."""
    if file.record is None:
        return f"its record cannot be read ({file.problem})"
    try:
        return HeldClaim(file.record, file.record.requests)
    except Exception as error:  # noqa: BLE001  an unusable record must not affect other claims
        return f"its record cannot be used ({type(error).__name__}: {shown(error)})"


def read_evidence(env: Sequence[str]) -> Evidence:
    """Parses the environment variables (``K=V``) that nri/plugin.py has selected by their prefixes."""
    if len(env) > MAX_VARIABLES or sum(map(len, env)) > MAX_VARIABLE_BYTES:
        limits = f"more than {MAX_VARIABLES} variables or {MAX_VARIABLE_BYTES >> 10} KiB of variables"
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
        return Evidence(fault=f"its environment refers to more than {MAX_CLAIMS} of this driver's claims")
    return Evidence({claim: tuple(variables.values()) for claim, variables in found.items()})


def authorize(
    evidence: Evidence, user: Owner, claims: Claims, proven: Sequence[HeldClaim] = ()
) -> tuple[Entitlement, tuple[ClaimUse, ...], Rejection | None]:
    """Returns a container's entitlement, the claims in that entitlement that are no longer allowed by any record (the
    container is an orphan with respect to these), and the rejection for claims that the container may not use.

    The rejection is None if the container may use every claim that the environment names. ``proven`` contains the
    claims that have been enforced for the container since it started; these stay in the entitlement even if they are
    rejected now.
    """
    found = {key: _judge(key, variables, user, claims) for key, variables in evidence.claims.items()}
    held = [result for result in found.values() if isinstance(result, HeldClaim)]
    refused = {key: result for key, result in found.items() if isinstance(result, Rejection)}
    if evidence.fault:
        refused["", ""] = Rejection(
            Reason.MALFORMED, f"{evidence.fault}; remove the variables from the pod and the image"
        )
    if not refused:
        return entitlement_from(held) if held else NO_ENTITLEMENT, (), None
    kept = [one for one in proven if one.key in refused or evidence.fault]
    lost = {one.key for one in kept}
    unknown = tuple(one for key, rejection in refused.items() if key not in lost for one in rejection.unknown_claims)
    named = tuple(
        rejection.unknown_claims[0] if rejection.unknown_claims else claim_use(key, evidence.claims[key])
        for key, rejection in refused.items()
        if key in evidence.claims
    )
    first = replace(next(iter(refused.values())), unknown_claims=unknown, claims=named)
    return entitlement_from([*held, *kept]), tuple(map(_claim_use, kept)), first


def _judge(key: ClaimKey, variables: Sequence[Variable], user: Owner, claims: Claims) -> HeldClaim | Rejection:
    held = claims.known.get(key, "this node has no record of it")
    if isinstance(held, str):
        return _no_record(key, variables, held)
    if user.pod_uid not in held.share.pods:
        return _not_reserved(held.record, variables)
    # The backend adds the variables in share.env to the container, so all of the runtime's later messages about the
    # container include these variables.
    runtime_limits = {(variable.name, variable.value) for variable in variables}
    if runtime_limits - held.share.env.items() != held.share.expected.items():
        requests = _requests(held.record, variables)
        if isinstance(requests, str):
            remedy = "only the driver may set variables with this name; remove them from the pod and the image"
            return Rejection(Reason.FORGED, f"{_name_of(held.record)}: {requests}; {remedy}")
        held = HeldClaim(held.record, requests)
    owner = claims.owner(held, user)
    if owner is None or owner == user or (held.record.sharing == "pod" and owner.pod_uid == user.pod_uid):
        return held
    return _owned(held.record, owner, user)


def _no_record(key: ClaimKey, variables: Sequence[Variable], why: str) -> Rejection:
    what = f"{shown(variables[0].name)} names {key[0]} {key[1]}, but {why}"
    text = f"{what}; name the claim in the pod's spec.resourceClaims instead of setting the variable. If it is named \
there, dra-frontend will rebuild the record and the kubelet will retry"
    running = f"{what}; the container still runs, so the claim's resources stay held. If its pod has been deleted, \
stop the container on the node; otherwise dra-frontend will rebuild the record from the API server"
    return Rejection(Reason.NO_RECORD, text, (claim_use(key, variables),), text_if_running=running)


def claim_use(claim: ClaimKey, variables: Sequence[Variable]) -> ClaimUse:
    """Returns the claim that these variables name, with its requests in variable order."""
    requests = dict.fromkeys(variable.key.request for variable in variables if variable.key.request)
    return ClaimUse(uid=claim[1], driver=claim[0], requests=tuple(requests))


def _name_of(record: AllocationRecord) -> str:
    return f"{record.driver} claim {record.claim.full_name} ({record.claim.uid})"


def _not_reserved(record: AllocationRecord, variables: Sequence[Variable]) -> Rejection:
    """Returns the rejection for a container in a pod for which the record does not reserve the claim.

    Either the claim has been reserved for this pod since the record was written, or the variable is forged.
    """
    text = f"{_name_of(record)} is recorded for {_pods(record)} and not for this pod (the claim is named in \
{variables[0].name}). If the pod names the claim in spec.resourceClaims, dra-frontend will now read from the API \
server which pods the claim is reserved for, and the result will determine whether the kubelet's next attempt \
succeeds. If the pod does not name it, remove the variable from the pod and the image"
    return Rejection(Reason.NOT_RESERVED, text, (claim_use((record.driver, record.claim.uid), variables),))


def _pods(record: AllocationRecord) -> str:
    names = [f"{record.claim.namespace}/{pod.name}" for pod in record.reserved_for]
    if not names:
        return "no pod"
    more = f" and {len(names) - _PODS_SHOWN} more" if len(names) > _PODS_SHOWN else ""
    return f"pod{'s' if names[1:] else ''} {', '.join(names[:_PODS_SHOWN])}{more}"


def _owned(record: AllocationRecord, owner: Owner, user: Owner) -> Rejection:
    """Returns the rejection for a container whose claim belongs to another container."""
    # Claims.owner() returns an owner only if reservedFor contains its pod, so the pod's name is known.
    pods = {pod.uid: f"{record.claim.namespace}/{pod.name}" for pod in record.reserved_for}
    text = f"{_name_of(record)} belongs to container {owner.container} of pod {pods.get(owner.pod_uid, owner.pod_uid)}"
    if owner.pod_uid == user.pod_uid:
        remedy = "give this container its own claim, share the claim in the pod (sharing: pod), or use it \
in an init container that exits before this container starts"
        return Rejection(Reason.SHARED, f"{text} while that container is running; {remedy}")
    remedy = "give this pod its own claim (use resourceClaimTemplateName), or delete that pod"
    return Rejection(Reason.SHARED, f"{text}, and pods cannot share it; {remedy}")


def _requests(record: AllocationRecord, variables: Sequence[Variable]) -> tuple[str, ...] | str:
    """Returns the requests that the variables name, or an error message if a variable does not match the record."""
    expected = {name: (r, value) for r in record.requests for name, value in request_env(record, r).items()}
    seen: set[str] = set()
    unions: list[Variable] = []
    for variable in variables:
        name = variable.name
        if name in expected:
            if variable.value != expected[name][1]:
                return f"{name}={shown(variable.value)} does not match the claim's allocation"
            seen.add(name)
        elif variable.key.driver == CPU_DRIVER and variable.key.request is None:
            unions.append(variable)
        else:
            return f"{name} refers to a request that the claim does not have"
    named = {expected[name][0] for name in seen}
    if lacking := sorted(name for name, (r, _) in expected.items() if r in named and name not in seen):
        return f"{lacking[0]} is missing, although {variables[0].name} is set"
    union = format_cpu_list(record.cpus_of(named))
    if any(not named or variable.value != union for variable in unions):
        return f"{unions[0].name}={shown(unions[0].value)} is not the union of the CPUs that the other variables list"
    return tuple(request for request in record.requests if request in named)


def _claim_use(held: HeldClaim) -> ClaimUse:
    driver, uid = held.key
    return ClaimUse(uid=uid, driver=driver, requests=held.requests, cpus=held.share.cpus)
