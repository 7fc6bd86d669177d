# SPDX-License-Identifier: Apache-2.0
"""Renders the chart for the tests in the guest, where QEMU provides this machine's loopback as 10.0.2.2.

Prints its port, then answers POSTs of values with the objects that `helm install` would create, until its standard
input ends. Helm takes a tenth of a second here, and most of a minute on an emulated processor.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.chart.helm import HelmError, render


class Answer(BaseHTTPRequestHandler):
    """Responds with the rendered objects, or with the error (status 422)."""

    def do_POST(self) -> None:
        """Renders the chart with the values in the body."""
        values = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status, text = 200, json.dumps(render(values))
        except HelmError as error:
            status, text = 422, json.dumps({"message": str(error)})
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing, because the port is the only expected output."""


def main() -> None:
    """Serves requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
