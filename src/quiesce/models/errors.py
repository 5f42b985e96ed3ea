"""The one error of this package."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used: `what` happened, and `remedy`, what its reader can do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what} {remedy}")
        self.what = what
        self.remedy = remedy
