# SPDX-License-Identifier: Apache-2.0
"""Model instances share equal field-name sets and equal CPU sets, and pydantic loads no plugins."""

import subprocess
import sys

from numa_contract.records import CpuAllocation, Owner, PoolCpus


def test_instances_share_the_set_of_fields_that_were_set() -> None:
    """As documented by pydantic, the set contains the names of the fields that were passed. A copy with changes has its
    own set.
    """
    values = {"request": "r", "device": "d", "cpus": "0-3"}
    first, second = CpuAllocation.model_validate(values), CpuAllocation.model_validate(values)
    assert first.model_fields_set is second.model_fields_set
    assert first.model_fields_set == {"request", "device", "cpus"}
    one = CpuAllocation(request="r", device="d", cpus=frozenset({1}))
    changed = one.model_copy(update={"joined": ()})
    assert one.model_fields_set == {"request", "device", "cpus"}
    assert changed.model_fields_set == {"request", "device", "cpus", "joined"}
    assert one.model_copy(deep=True).model_fields_set is one.model_fields_set


def test_equal_cpu_lists_share_one_set() -> None:
    """A node has few distinct CPU lists, but hundreds of documents contain them."""
    text = '{"cpus": "0-3,8", "near": "0-3"}'
    first, second = PoolCpus.model_validate_json(text), PoolCpus.model_validate_json(text)
    assert first.cpus is second.cpus
    assert first.cpus == {0, 1, 2, 3, 8}


def test_pydantic_does_not_search_for_plugins() -> None:
    """A plugin search would import importlib.metadata (1.2 MB), and a plugin could change which documents are valid."""
    code = "import sys, numa_contract.config, numa_contract.records; print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_names_of_unknown_fields_are_not_remembered() -> None:
    """If the names were remembered, a document's author could make the cache, and with it the process, grow without
    limit.
    """
    names = {f"field{number}": "" for number in range(50)}
    first, second = (Owner.model_validate({"podUid": "a", "container": "b", **names}) for _ in range(2))
    assert first == second
    assert first.model_fields_set is not second.model_fields_set
