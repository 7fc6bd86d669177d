# SPDX-License-Identifier: Apache-2.0
"""Reading a file that anybody on the node may have put there, and writing one that others read at any time."""

import errno
import os
import secrets
import stat

# Nearly every file of sysfs fits into one; an empty read ends it. A buffer for the most would be mapped and unmapped
# each time, which took a seventh of an idle frontend's time in the virtual machine of the node tests.
_READ_BYTES = 1 << 16


def read_regular(path: str, most_bytes: int, *, follow: bool = False) -> bytes:
    """Returns the content of a regular file. OSError for everything else, and for one of more than ``most_bytes``.

    Never waits, and follows no link unless it may: a FIFO would block its reader, a link could lead to /dev/zero.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        pieces: list[bytes] = []
        left = most_bytes + 1
        while left > 0 and (piece := os.read(descriptor, min(left, _READ_BYTES))):
            pieces.append(piece)
            left -= len(piece)
    finally:
        os.close(descriptor)
    if left <= 0:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", path)
    return b"".join(pieces)


def replace_file(path: str, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Puts a file in its place whole: who reads it sees the former one or this one. OSError leaves all as it was.

    The temporary file lies beside it under a hidden name that does not end as the file's does: a rename from elsewhere
    raises no event that container runtimes watch for, and nobody reads it half written.
    """
    directory, _, name = path.rpartition("/")
    temporary = f"{directory}/.{name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.rename(temporary, path)  # noqa: PTH104
    except OSError:
        if os.path.lexists(temporary):
            os.unlink(temporary)  # noqa: PTH108
        raise
