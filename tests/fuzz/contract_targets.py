# SPDX-License-Identifier: Apache-2.0
"""Parsers that both services use for the CDI directory, environments and the configuration file."""

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from numa_contract import cdi, pagesize
from numa_contract.config import ConfigError, parse_config
from numa_contract.cpuset import MAX_LIST, format_cpu_list, parse_cpu_list
from numa_contract.documents import parse_json
from numa_contract.errors import ContractError, MalformedError
from numa_contract.names import CPU_DRIVER, cdi_file_name, parse_env_key
from numa_contract.records import AllocationRecord, parse_record
from numa_node.claim_directory import ClaimDirectory
from numa_node.config_file import parse_yaml

from tests.fuzz.documents import spoilt, written, written_inside
from tests.fuzz.target import Target
from tests.strategies import contract

_UID = "5f0d3a52-0000-4000-8000-00000000000a"
_NAME = cdi_file_name(CPU_DRIVER, _UID)


def text(data: bytes) -> str:
    """Decodes any bytes; invalid UTF-8 becomes characters that cannot be encoded again."""
    return data.decode(errors="surrogateescape")


def _cpu_list(data: bytes) -> None:
    found = parse_cpu_list(text(data))
    assert parse_cpu_list(format_cpu_list(found)) == found


def _page_size(data: bytes) -> None:
    size = pagesize.parse_page_size(text(data))
    spellings = (pagesize.short_page_size, pagesize.kubernetes_page_size, pagesize.oci_page_size)
    assert {pagesize.parse_page_size(spell(size)) for spell in spellings} == {size}


def _record(data: bytes) -> None:
    record = parse_record(parse_json(data, cdi.MAX_CLAIM_FILE, "record", "fuzzed"))
    name = cdi_file_name(record.driver, record.claim.uid)
    # Any record that can be parsed can also be written. Parsing the written file returns the same record or None.
    file = cdi.parse_claim_file(name, cdi.dump_claim_file(record))
    assert file.record is None or file.record == record


class _Directory:
    """A CDI directory with one claim file, which may contain anything. Reading it never raises an error."""

    def __init__(self) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="fuzz")
        self._file = Path(self._held.name, _NAME)

    def read(self, data: bytes) -> None:
        """Reads the directory as the services do when they start, and then again; the result must be the same."""
        self._file.write_bytes(data)
        directory = ClaimDirectory(self._held.name)
        view = directory.refresh()
        assert directory.refresh(thorough=True) == view
        assert view.files or view.problems
        assert all(len(problem.encode(errors="replace")) < 4096 for problem in view.problems.values())


def _document(record: AllocationRecord) -> Any:
    return record.model_dump(mode="json")


def _file(record: AllocationRecord, inside: str) -> Any:
    document = json.loads(cdi.dump_claim_file(record))
    return document | {"annotations": {cdi.RECORD_ANNOTATION: inside}}


_records = contract.records().map(lambda record: record.model_copy(update={"driver": CPU_DRIVER, "memory": ()}))
_of_one_claim = _records.map(
    lambda record: record.model_copy(update={"claim": record.claim.model_copy(update={"uid": _UID})})
)
_claim_files = spoilt(
    st.builds(_file, _of_one_claim, st.one_of(spoilt(_of_one_claim.map(_document)), st.just([])).map(written_inside))
).map(written)
_LARGE: tuple[Any, ...] = ([[]] * 200_000, ["\ud800"] * 100_000, "\\" * 500_000, [1e9] * 100_000)
_FULL = [json.dumps(document).encode() for document in _LARGE]
_FULL.append(json.dumps({"version": 1, "parameters": {f"r{number}": number for number in range(60_000)}}).encode())
_FULL += [b"[" * cdi.MAX_CLAIM_FILE, b'{"a":' * 200_000, b'"' + b"\xff" * 1_000_000, b"9" * cdi.MAX_CLAIM_FILE]
_LISTS = (
    b"0-8191," * 5000,
    b",".join(b"%d" % cpu for cpu in range(0, 8192, 2)),
    b"0," * (MAX_LIST // 2),
    b"0" * MAX_LIST,
    b"1" * (1 << 20),
    b" " * (1 << 20),
)
_KEYS = [
    b"DRA_CPUSET_" + b"a" * 1_000_000,
    b"DRAMEMORY_a_" + b"_hugepages_1Mi" * 70_000,
    b"DRAMEMORY_" + b"_" * 500_000,
]
_CONFIG = {
    "apiVersion": "v1alpha1",
    "groupBy": "l3",
    "reservedCPUs": "0-3",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": 0}}],
    "withheldCPUs": 2,
    "maxClaimFraction": 0.5,
    "memoryProtection": {"allowed": ["low"], "maxFraction": 0.5},
    "sharedPool": {"grow": "lazy"},
    "cdiDir": "/var/run/cdi",
}
_ALIASES = b"".join(b"%c: &%c [%s]\n" % (k, k, b"*%c," % (k - 1) * 9) for k in range(ord("b"), ord("t")))
_YAML_NUMBERS = (b"0x" + b"f" * 4000 + b": 1\n", b"withheldCPUs: 0x" + b"f" * 4000, b"a: " + b"1:" * 2000 + b"1\n")
_YAML = (
    *_YAML_NUMBERS,
    b"a: &a [1]\n" + _ALIASES,
    b"reservedMemory: &a [*a]\n",
    b"- " * 1000,
    b"a: !!python/object:os.system x\n",
)

TARGETS = [
    Target(
        "cpu-list",
        _cpu_list,
        contract.cpu_sets.map(format_cpu_list).map(str.encode),
        (MalformedError,),
        milliseconds=30,
        max_bytes=2 * MAX_LIST,
        bombs=_LISTS,
    ),
    Target(
        "page-size",
        _page_size,
        contract.page_sizes.map(pagesize.kubernetes_page_size).map(str.encode),
        (MalformedError,),
        milliseconds=10,
        bombs=(b"9" * 1_000_000, b"hugepages-" * 100_000),
    ),
    Target(
        "environment-key",
        lambda data: parse_env_key(text(data)),
        st.sampled_from((b"DRA_CPUSET_a_r", b"DRAMEMORY_a_r_hugepages_2Mi", b"DRAMEMORY_a_NUMANodes")),
        (MalformedError,),
        milliseconds=10,
        bombs=_KEYS,
    ),
    Target(
        "record",
        _record,
        spoilt(contract.records().map(_document)).map(written),
        (ContractError,),
        milliseconds=800,
        max_bytes=cdi.MAX_CLAIM_FILE + 1,
        bombs=_FULL,
    ),
    Target(
        "claim-file",
        lambda data: cdi.parse_claim_file(_NAME, data),
        _claim_files,
        (ContractError,),
        milliseconds=500,
        max_bytes=cdi.MAX_CLAIM_FILE + 1,
        bombs=_FULL,
    ),
    Target(
        "claim-directory",
        _Directory().read,
        _claim_files,
        milliseconds=1000,
        max_bytes=cdi.MAX_CLAIM_FILE + 1,
        bombs=_FULL,
    ),
    Target(
        "configuration",
        lambda data: parse_config(parse_yaml(data, "fuzzed"), "fuzzed"),
        spoilt(st.just(_CONFIG)).map(written),
        (ConfigError,),
        # The limit is generous: the operator writes this file, and a parser written in Python reads it only once.
        milliseconds=2000,
        max_bytes=1 << 10,
        bombs=_YAML,
    ),
]
