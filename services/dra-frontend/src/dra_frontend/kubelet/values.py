# SPDX-License-Identifier: Apache-2.0
"""What crosses between the kubelet's gRPC edge and the rest: claim names in, prepared devices or failures out."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class ClaimName:
    """A ResourceClaim as the kubelet names it. The object may be gone by the time of unprepare."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name} ({self.uid})"


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """One allocated device and the CDI devices by which a container gets it."""

    requests: tuple[str, ...]
    """Base names; none at all means every request of the claim."""
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    """A pure function of claim and request: the kubelet checkpoints them."""
    share_id: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A claim is ready; never without devices, since the container would start with nothing injected."""

    devices: tuple[PreparedDevice, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A claim could not be prepared or unprepared; the text reaches the pod's events."""

    text: str


class Health(Enum):
    """Health of a device, by the numbers of the wire."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """How one device is; the kubelet cuts the message at 1024 characters."""

    pool: str
    device: str
    health: Health
    message: str = ""
