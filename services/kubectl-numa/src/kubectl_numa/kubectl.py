# SPDX-License-Identifier: Apache-2.0
"""Access to the cluster. Runs the user's own ``kubectl`` as a child process, with the user's permissions."""

import json
import re
import subprocess
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

ENVIRONMENT: Final = "KUBECTL"
"""Environment variable with the path of the ``kubectl`` to use."""
_PAGE_SIZE: Final = 500
"""Maximum number of objects in the response to one request."""
MAX_LISTED: Final = 250_000
"""Maximum number of objects that are read from one list. Kubernetes supports 150,000 pods in a cluster."""
MAX_NESTING: Final = 64
"""Maximum depth to which nested lists and maps are read. Kubernetes API objects have about 20 levels."""
# A string is matched as a whole, so brackets inside a string are not mistaken for nesting. No character is matched
# twice, so the time is linear.
_BRACKET: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}]', re.DOTALL)
_FORWARDING: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")


class KubectlError(Exception):
    """Raised if kubectl is not installed or fails. The message contains kubectl's own error message."""


class Kubectl:
    """Runs ``kubectl`` with the options that select the cluster and the user."""

    def __init__(self, program: str, flags: Sequence[str]) -> None:
        self._command = (program, *flags)

    def _output(self, *arguments: str) -> str:
        try:
            done = subprocess.run([*self._command, *arguments], capture_output=True, check=False)  # noqa: S603
        except OSError as error:
            raise KubectlError(
                f"{self._command[0]}: {error.strerror}; set {ENVIRONMENT} to the path of kubectl"
            ) from error
        if done.returncode:
            raise KubectlError(
                done.stderr.decode(errors="replace").strip() or f"kubectl exited with status {done.returncode}"
            )
        return done.stdout.decode(errors="replace")

    def get(self, path: str) -> Any:
        """Returns the parsed JSON response to a GET request for an API path. Raises KubectlError."""
        try:
            return json.loads(shallow(self._output("get", "--raw", path)))
        except ValueError as error:
            raise KubectlError(f"the response to GET {path} is not JSON") from error

    def items(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        """Yields the objects in a list, which is read page by page.

        Raises KubectlError if the list cannot be read, or if it never ends, which is possible because only the server
        decides whether another page follows.
        """
        token, seen = "", set[str]()
        for _ in range(MAX_LISTED // _PAGE_SIZE):
            found = self.get(
                f"{path}?{urlencode({**query, 'limit': _PAGE_SIZE} | ({'continue': token} if token else {}))}"
            )
            if not isinstance(found, dict) or not isinstance(listed := found.get("items") or [], list):
                raise KubectlError(f"the response to GET {path} is not a list")
            yield from (one for one in listed if isinstance(one, dict))
            metadata = found.get("metadata")
            if not (token := str(metadata.get("continue") or "") if isinstance(metadata, dict) else ""):
                return
            if token in seen:
                raise KubectlError(f"the response to GET {path} repeats the same page; is this an API server?")
            seen.add(token)
        raise KubectlError(
            f"the list from GET {path} is not complete after {MAX_LISTED} objects; is this an API server?"
        )

    def namespace(self) -> str:
        """Returns the namespace of the user's current context. Raises KubectlError."""
        try:
            found = json.loads(shallow(self._output("config", "view", "--minify", "-o", "json")))
            return str((found["contexts"] or [{}])[0].get("context", {}).get("namespace") or "default")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise KubectlError("the output of kubectl config view cannot be parsed") from error

    def execute(
        self, namespace: str, pod: str, container: str, command: Sequence[str], stdin: str = ""
    ) -> tuple[int, str]:
        """Runs a command in a container with ``stdin`` as standard input. The command inherits standard output.

        Returns the command's exit status and standard error. Raises KubectlError.
        """
        arguments = ["exec", *(["-i"] if stdin else []), "-n", namespace, pod, "-c", container, "--", *command]
        whole = [*self._command, *arguments]
        try:
            if stdin:
                done = subprocess.run(whole, input=stdin.encode(), stderr=subprocess.PIPE, check=False)  # noqa: S603
            else:
                done = subprocess.run(whole, stderr=subprocess.PIPE, check=False)  # noqa: S603
        except OSError as error:
            raise KubectlError(f"{self._command[0]}: {error.strerror}") from error
        return done.returncode, done.stderr.decode(errors="replace")

    def forward(self, namespace: str, pod: str, local: int, port: int, *, open_browser: bool) -> int:
        """Forwards a local port to a pod until the user interrupts it. Opens the browser if ``open_browser`` is true.

        Returns kubectl's exit status. Raises KubectlError.
        """
        arguments = ["port-forward", "-n", namespace, f"pod/{pod}", f"{local or ''}:{port}"]
        try:
            child = subprocess.Popen([*self._command, *arguments], stdout=subprocess.PIPE, text=True)  # noqa: S603
        except OSError as error:
            raise KubectlError(f"{self._command[0]}: {error.strerror}") from error
        with child:
            assert child.stdout is not None  # noqa: S101  for the type checker: it is a pipe
            try:
                for line in child.stdout:
                    if match := _FORWARDING.match(line):
                        address = f"http://localhost:{match[1]}/"
                        print(f"{address}   (Ctrl-C stops it)", flush=True)
                        if open_browser:
                            webbrowser.open(address)
            finally:
                child.terminate()
        return child.returncode


def shallow(text: str) -> str:
    """Returns a JSON document with null in place of each value nested deeper than MAX_NESTING levels.

    Anyone who may create a claim can nest its parameters thousands of levels deep. Such a claim must not hide the other
    claims in the list. The parser's own limit cannot be relied on, since it depends on the interpreter.
    """
    kept, depth, start = [], 0, 0
    for token in _BRACKET.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth == MAX_NESTING + 1:
                kept += [text[start : token.start()], "null"]
        elif token[0] in "]}":
            if depth == MAX_NESTING + 1:
                start = token.end()
            depth -= 1
    return "".join([*kept, text[start:] if depth <= MAX_NESTING else ""])


def path_of(group: str, plural: str, namespace: str = "", name: str = "") -> str:
    """Returns the API path of a list or an object. Names are quoted, so a name cannot lead to a different path."""
    root = f"/apis/{group}/v1" if group else "/api/v1"
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{root}{inside}/{plural}" + (f"/{quote(name, safe='')}" if name else "")


def labels_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an object's labels."""
    found = (document.get("metadata") or {}).get("labels")
    return found if isinstance(found, dict) else {}
