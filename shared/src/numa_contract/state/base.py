# SPDX-License-Identifier: Apache-2.0
"""The base of the documents of the state endpoint."""

from pydantic import ConfigDict

from numa_contract.records import Document


class StateDocument(Document):
    """Base of the documents that the state endpoint shows to people and tools.

    Validators and serializers are built at the first use of a model, since a node on which nobody asks needs none.
    """

    model_config = ConfigDict(defer_build=True)
