# SPDX-License-Identifier: Apache-2.0
"""API server errors. Only errors that callers handle differently have their own class."""


class KubeError(Exception):
    """Raised if a call to the API server fails. ``operation`` is the verb and resource, ``detail`` the reason."""

    retriable = False

    def __init__(self, operation: str, detail: str, retry_after: float = 0.0) -> None:
        """``retry_after`` is the delay in seconds that the server requested, at most two minutes."""
        self.operation = operation
        self.detail = detail
        self.retry_after = retry_after
        super().__init__(f"{operation}: {detail}")


class UnavailableError(KubeError):
    """The server did not respond in time, sent a malformed response, or asked the client to retry later."""

    retriable = True


class UnreachableError(UnavailableError):
    """The connection could not be established, or it broke, so another call would fail as well."""


class UnreadableError(UnavailableError):
    """The response is JSON, but this client rejects part of it, which is nested too deeply or contains a huge number or
    a lone surrogate.

    The object's author may have written the rejected part. The next response will contain it again, but other objects
    are not affected.
    """

    retriable = False


class TooLargeError(UnavailableError):
    """A response exceeds the size limit. ``beginning`` contains the first part of the response."""

    def __init__(self, operation: str, detail: str, beginning: bytes = b"") -> None:
        super().__init__(operation, detail)
        self.beginning = beginning


class ForbiddenError(KubeError):
    """The server denied the call (403) or did not accept the credentials (401). The message names the missing
    permission.
    """


class ConflictError(KubeError):
    """The object has changed since it was read, already exists, or does not match the preconditions (409)."""

    retriable = True


class InvalidError(KubeError):
    """The server rejected the document itself (400, 422), and would reject it again."""


class NotFoundError(KubeError):
    """The server reports that no object with this name exists (404)."""


class WatchExpiredError(KubeError):
    """The resource version from which the watch should start has expired (410). The objects must be listed again."""

    retriable = True


class KubeConfigError(KubeError):
    """The address or credentials cannot be read from the kubeconfig file or the service account."""


def requested_delay(error: Exception) -> float:
    """Returns the seconds that the server has asked the client to wait before the next call, or 0 if it has not."""
    return error.retry_after if isinstance(error, KubeError) else 0.0
