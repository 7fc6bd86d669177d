# SPDX-License-Identifier: Apache-2.0
"""Base class of the state endpoint's documents."""

from pydantic import ConfigDict

from numa_contract.records import Document


class StateDocument(Document):
    """Base class of the documents that the state endpoint returns to users and tools.

    A model's validator and serializer are built only when the model is first used, since they take up memory and most
    nodes never receive a request for these documents.
    """

    model_config = ConfigDict(defer_build=True)
