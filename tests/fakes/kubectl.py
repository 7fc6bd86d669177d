# SPDX-License-Identifier: Apache-2.0
"""A fake ``kubectl`` with the parts that a plugin uses: raw requests, a context's namespace, and calls that are only
recorded.

``exec`` and ``port-forward`` require a kubelet behind the API server, which does not exist here: they print their
arguments and exit with the errors in FAKE_KUBECTL_ERRORS and the status in FAKE_KUBECTL_STATUS. A command with the flag
in FAKE_KUBECTL_UNKNOWN fails as argparse does on an unknown flag. ``python -m tests.fakes.kubectl ARGUMENTS`` runs the
fake.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def _context(document: dict[str, Any]) -> dict[str, Any]:
    name = document["current-context"]
    return next(dict(one["context"]) for one in document["contexts"] if one["name"] == name)


def _get(document: dict[str, Any], path: str) -> int:
    context = _context(document)
    server = next(one["cluster"]["server"] for one in document["clusters"] if one["name"] == context["cluster"])
    try:
        with urllib.request.urlopen(server + path, timeout=30) as answer:
            sys.stdout.write(answer.read().decode())
    except urllib.error.HTTPError as error:
        status = json.loads(error.read())
        print(f"Error from server ({status['reason']}): {status['message']}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Unable to connect to the server: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """Runs one call and returns the exit status."""
    parser = argparse.ArgumentParser(prog="kubectl")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    given, rest = parser.parse_known_args(arguments)
    document = json.loads(given.kubeconfig.read_text())
    match rest:
        case ["get", "--raw", path]:
            return _get(document, path)
        case ["config", "view", "--minify", "-o", "json"]:
            print(json.dumps({"contexts": [{"context": _context(document)}]}))
            return 0
        case ["exec", *more] if (flag := os.environ.get("FAKE_KUBECTL_UNKNOWN")) and flag in more:
            sys.stdin.read()
            print(f"usage: dra-frontend [-h]\ndra-frontend: error: unrecognized arguments: {flag} -", file=sys.stderr)
            print("command terminated with exit code 2", file=sys.stderr)
            return 2
        case ["exec", *more]:
            print(json.dumps(more))
            sys.stderr.write(os.environ.get("FAKE_KUBECTL_ERRORS", ""))
        case ["port-forward", *more]:
            print(json.dumps(more), file=sys.stderr)
            print("Forwarding from 127.0.0.1:40001 -> 8082\nForwarding from [::1]:40001 -> 8082")
        case _:
            print(f"error: unknown command {rest}", file=sys.stderr)
            return 1
    return int(os.environ.get("FAKE_KUBECTL_STATUS", "0"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
