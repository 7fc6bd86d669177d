# SPDX-License-Identifier: Apache-2.0
"""Base class of the state endpoint's documents."""

from pydantic import ConfigDict

from numa_contract.records import Document


class StateDocument(Document):
    """Base class of the documents that the state endpoint returns to people and tools.

    A model's validator and serializer are built when it is first used, since they take memory, and on most nodes these
    documents are never requested.
    """

    model_config = ConfigDict(defer_build=True)
