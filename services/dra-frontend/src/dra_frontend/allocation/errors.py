# SPDX-License-Identifier: Apache-2.0
"""The one way in which a claim is refused."""


class Refused(Exception):  # noqa: N818 - an answer to the claim's author, not a fault of ours
    """Why a claim is not prepared: one sentence with the remedy, which reaches the pod's events."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)
