# SPDX-License-Identifier: Apache-2.0
"""Errors of the API server. Only errors that callers handle differently have their own class."""


class KubeError(Exception):
    """Raised if a call to the API server fails. ``operation`` is verb and resource, ``detail`` the reason."""

    retriable = False

    def __init__(self, operation: str, detail: str, retry_after: float = 0.0) -> None:
        """``retry_after`` is the delay in seconds requested by the server, at most two minutes."""
        self.operation = operation
        self.detail = detail
        self.retry_after = retry_after
        super().__init__(f"{operation}: {detail}")


class UnavailableError(KubeError):
    """No response in time, a malformed response, or one that requests a later retry."""

    retriable = True


class UnreachableError(UnavailableError):
    """The connection failed or broke, so that another call would fail as well."""


class UnreadableError(UnavailableError):
    """The response is JSON with a part that this client rejects: nested too deeply, a huge number, or a lone surrogate.

    The part may have been written by the object's author. The next response will contain it again, and other objects
    are not affected.
    """

    retriable = False


class TooLargeError(UnavailableError):
    """A response exceeds the size limit. ``beginning`` is its first part."""

    def __init__(self, operation: str, detail: str, beginning: bytes = b"") -> None:
        super().__init__(operation, detail)
        self.beginning = beginning


class ForbiddenError(KubeError):
    """The server denied the call (403) or does not accept the credentials (401). The text names the missing
    permission.
    """


class ConflictError(KubeError):
    """The object has changed since it was read, already exists, or does not match the preconditions (409)."""

    retriable = True


class InvalidError(KubeError):
    """The server rejected the document itself (400, 422), and would reject it again."""


class NotFoundError(KubeError):
    """The server reports that there is no object of this name (404)."""


class WatchExpiredError(KubeError):
    """The version from which a watch should start is no longer known (410): list again."""

    retriable = True


class KubeConfigError(KubeError):
    """The address or credentials cannot be read from the kubeconfig file or the service account."""
