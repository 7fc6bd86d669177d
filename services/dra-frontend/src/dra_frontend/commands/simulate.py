# SPDX-License-Identifier: Apache-2.0
"""What would happen: prepares and unprepares by the code that the kubelet's calls run through, touching nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Final

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_CAPACITY, CPU_DRIVER, ClaimKey, check_uid
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dra_frontend.allocation.claim import Refused, read_claim
from dra_frontend.allocation.decide import decide, judge
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.commands.forms import Input, validated
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice
from dra_frontend.devices.quantity import format_quantity, parse_quantity

NODE: Final = "simulated"
_WHOLE_KEYS: Final = frozenset({"apiVersion", "cpuConfig", "memoryConfig", "kind"})


def _amount(value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a quantity, such as 4 or 1500m")
    return parse_quantity(value)


class Request(Input):
    """One allocation result, as the scheduler would make it."""

    device: Annotated[str, Field(min_length=1)]
    cpus: Annotated[Fraction, BeforeValidator(_amount)] | None = None
    """Amount of a shared device, settled by its request policy as the scheduler does."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] | None = None
    parameters: dict[str, Any] | None = None
    """Opaque parameters, whole or only what is inside ``cpuConfig``."""


class Unprepare(Input):
    """A claim that is unprepared."""

    uid: Annotated[str, AfterValidator(check_uid)]


class Prepare(Unprepare):
    """A claim that is prepared."""

    requests: Annotated[list[Request], Field(min_length=1)]


class Operation(Input):
    """One step: exactly one of both."""

    prepare: Prepare | None = None
    unprepare: Unprepare | None = None

    @model_validator(mode="after")
    def _one(self) -> "Operation":
        if (self.prepare is None) == (self.unprepare is None):
            raise ValueError("must have exactly one of prepare and unprepare")
        return self


class _Operations(Input):
    operations: list[Operation]


def read_operations(document: Any, source: str) -> list[Operation]:
    """Returns the operations of a claims file; raises ConfigError naming every fault with its place."""
    return validated(_Operations, document, source).operations


@dataclass(slots=True)
class Simulation:
    """A node that exists in memory alone."""

    inventory: Inventory
    config: Config = field(default_factory=Config)
    files: dict[ClaimKey, ClaimFile] = field(default_factory=dict)

    def run(self, operation: Operation) -> dict[str, Any]:
        """Returns the outcome of one step."""
        if operation.prepare is not None:
            return self.prepare(operation.prepare)
        uid = operation.unprepare.uid if operation.unprepare else ""
        self.files.pop((CPU_DRIVER, uid), None)
        return {"uid": uid}

    def prepare(self, wanted: Prepare) -> dict[str, Any]:
        """Returns the CPUs of a claim, or why it has none."""
        for request in wanted.requests:
            device = self.inventory.devices.get((CPU_DRIVER, NODE, request.device))
            if isinstance(device, CpuDevice) and device.capacity is None and request.cpus not in (None, 1):
                return {"uid": wanted.uid, "error": f"device {device.name} is one CPU, {request.cpus} are requested"}
        try:
            judged = judge(read_claim(self._document(wanted)), CPU_DRIVER, self.inventory, self.config)
            record = decide(judged, self.inventory, Ledger(self.files))
        except Refused as refusal:
            return {"uid": wanted.uid, "error": str(refusal)}
        self.files[CPU_DRIVER, wanted.uid] = ClaimFile(CPU_DRIVER, wanted.uid, record, record.cpus_of())
        return {
            "uid": wanted.uid,
            "cpus": format_cpu_list(record.cpus_of()),
            "perRequest": {request: format_cpu_list(record.cpus_of([request])) for request in record.requests},
        }

    def pool(self) -> str:
        """Returns the CPUs of everybody without a claim: the reserved ones where no other is left."""
        online, reserved = self.inventory.machine.online, self.inventory.reserved_cpus
        return format_cpu_list(online - reserved - Ledger(self.files).held_cpus() or reserved)

    def _document(self, wanted: Prepare) -> dict[str, Any]:
        """Returns the claim as the scheduler leaves it in the API server."""
        results, configs = [], []
        for index, request in enumerate(wanted.requests):
            name = request.name or f"request-{index}"
            results.append(self._result(f"{wanted.uid}-{index}", name, request))
            if (parameters := request.parameters) is not None:
                if parameters and not _WHOLE_KEYS & parameters.keys():
                    parameters = {"apiVersion": "v1alpha1", "cpuConfig": parameters}
                opaque = {"driver": CPU_DRIVER, "parameters": parameters}
                configs.append({"source": "FromClaim", "requests": [name], "opaque": opaque})
        pod = {"resource": "pods", "uid": f"pod-{wanted.uid}", "name": f"pod-{wanted.uid}"}
        return {
            "metadata": {"uid": wanted.uid, "namespace": NODE, "name": wanted.uid},
            "status": {"allocation": {"devices": {"results": results, "config": configs}}, "reservedFor": [pod]},
        }

    def _result(self, share: str, name: str, request: Request) -> dict[str, Any]:
        result = {"request": name, "driver": CPU_DRIVER, "pool": NODE, "device": request.device}
        device = self.inventory.devices.get((CPU_DRIVER, NODE, request.device))
        if not isinstance(device, CpuDevice) or device.capacity is None:
            return result
        amount = format_quantity(device.capacity.consumed(request.cpus))
        return {**result, "shareID": share, "consumedCapacity": {CPU_CAPACITY: amount}}


def simulate(inventory: Inventory, operations: Sequence[Operation], config: Config) -> dict[str, Any]:
    """Runs operations one after another; returns an outcome for each, and the shared pool at the end."""
    simulation = Simulation(inventory, config)
    return {"operations": [simulation.run(operation) for operation in operations], "pool": simulation.pool()}
