# SPDX-License-Identifier: Apache-2.0
"""The cluster with our services as a kubelet runs them: the chart's pod from the built images, instead of processes."""

import json
import subprocess
import time
import uuid
from pathlib import Path

from tests.node.rig import figures
from tests.node.rig.cluster import NODE_NAME, Cluster
from tests.node.rig.driver_pod import DriverPod
from tests.node.rig.instance import Instance
from tests.node.rig.node import Node

ARCHIVES = Path("/opt/numa/images")  # put in by run.sh
IMAGES = ("dra-frontend", "nri-backend")


class ImageCluster(Cluster):
    """As Cluster, with one instance; the images are imported when it starts."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        # The chart's objects, as run.sh has put them in.
        objects = json.loads((ARCHIVES / "chart.json").read_text())
        self.driver = DriverPod(node, objects, str(uuid.uuid4()), NODE_NAME)

    def start(self) -> None:
        for image in IMAGES:
            archive, began = ARCHIVES / f"{image}.tar", time.monotonic()
            subprocess.run(["ctr", "-n", "k8s.io", "images", "import", archive], check=True, stdout=subprocess.DEVNULL)
            took = time.monotonic() - began
            figures.note(f"import of {image}", f"{archive.stat().st_size / 1e6:.0f} MB, {took:.0f} s")
        super().start()

    def _make_instance(self, number: int) -> Instance:
        return Instance(self.driver.uid, self.driver.backend, self.driver.frontend, self.times)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.driver.remove()
