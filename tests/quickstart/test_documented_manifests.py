# SPDX-License-Identifier: Apache-2.0
"""Documented claims as a real kubectl sends them ("make quickstart-check").

`tests/chart/test_documented_manifests.py` uses Helm in place of kubectl and runs everywhere. This test shows that both
read the same values.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from numa_node.config_file import parse_yaml

from tests.chart.test_documented_manifests import check_typed
from tests.chart.test_yaml_reading import WORDS
from tests.rigs.documented_manifests import objects, words

_ANNOTATION = "typed=here"


def sent(text: str, directory: Path) -> list[Any]:
    """Returns the objects that kubectl creates from a file, without contacting a cluster."""
    file = directory / "manifests.yaml"
    file.write_text(text)
    command = [os.environ["KUBECTL"], "annotate", "--local", "-o", "json", "-f", str(file), _ANNOTATION]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    decoder, found = json.JSONDecoder(), []
    while printed := printed.lstrip():
        document, end = decoder.raw_decode(printed)
        del document["metadata"]["annotations"]
        found.append(document)
        printed = printed[end:]
    return found


def test_kubectl_sends_documented_manifests_unchanged(tmp_path: Path) -> None:
    """Covers the objects in examples and pages, each value in the tables without quotes, and other common spellings."""
    manifests = [*objects(), *words()]
    documents = sent("---\n".join(f"{one.text}\n" for one in manifests), tmp_path)
    for manifest, document in zip(manifests, documents, strict=True):
        check_typed(manifest, json.dumps(document))


def test_kubectl_reads_scalars_as_the_driver_does(tmp_path: Path) -> None:
    """Covers words and numbers that YAML readers interpret differently."""
    text = "kind: Words\napiVersion: v1\nmetadata: {name: words}\nwords:\n"
    text += "".join(f"  k{number:04}: {word}\n" for number, word in enumerate(WORDS))
    (document,) = sent(text, tmp_path)
    assert json.dumps(document["words"]) == json.dumps(parse_yaml(text.encode(), "words")["words"])
