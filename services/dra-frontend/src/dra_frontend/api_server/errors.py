# SPDX-License-Identifier: Apache-2.0
"""Errors of the API server. Only those that a caller handles in its own way have a class."""


class KubeError(Exception):
    """A call to the API server did not do what was asked. ``operation`` is verb and resource, ``detail`` the reason."""

    retriable = False

    def __init__(self, operation: str, detail: str, retry_after: float = 0.0) -> None:
        """``retry_after`` is in seconds, where the server said so; two minutes at most."""
        self.operation = operation
        self.detail = detail
        self.retry_after = retry_after
        super().__init__(f"{operation}: {detail}")


class UnavailableError(KubeError):
    """No answer in time, one that is not an answer, or one that asks to come back later."""

    retriable = True


class UnreachableError(UnavailableError):
    """The connection failed or broke off, so that another call would fail as well."""


class UnreadableError(UnavailableError):
    """The answer is JSON with a part that is never read: nested too deep, a huge number, a lone surrogate.

    The author of the object may have written that part. The next answer contains it again, and other objects are not
    affected.
    """

    retriable = False


class TooLargeError(UnavailableError):
    """An answer is longer than what is read of one; ``beginning`` is the part that was read first."""

    def __init__(self, operation: str, detail: str, beginning: bytes = b"") -> None:
        super().__init__(operation, detail)
        self.beginning = beginning


class ForbiddenError(KubeError):
    """The server knows us and says no (403), or does not know us (401); the text says what to grant."""


class ConflictError(KubeError):
    """The object changed since it was read, exists already, or is not the one of the preconditions (409)."""

    retriable = True


class InvalidError(KubeError):
    """The server refuses the document itself (400, 422); the same document will be refused again."""


class NotFoundError(KubeError):
    """The server says that there is no object of this name (404)."""


class WatchExpiredError(KubeError):
    """The version that a watch wants to start from is no longer known (410): list again."""

    retriable = True


class KubeConfigError(KubeError):
    """How to reach the API server cannot be read from the kubeconfig file or the service account."""
