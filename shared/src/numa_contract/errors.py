# SPDX-License-Identifier: Apache-2.0
"""The ways in which something that came from outside can be unreadable."""


class ContractError(ValueError):
    """Something that crossed the border between the containers, or came from the operator, cannot be used."""


class MalformedError(ContractError):
    """A text does not have the form it must have."""

    def __init__(self, kind: str, text: str, reason: str) -> None:
        self.kind = kind
        self.text = text
        self.reason = reason
        super().__init__(f"{kind} {text!r}: {reason}")


class UnsupportedVersionError(ContractError):
    """A document is of a format version that this release cannot read."""

    def __init__(self, kind: str, version: object, supported: int) -> None:
        self.kind = kind
        self.version = version
        self.supported = supported
        super().__init__(f"{kind} has format version {version}; this release reads up to {supported}")
