"""What two engines must agree on before they are paired, and how much one of them can take."""

from __future__ import annotations

from typing import Literal

import msgspec


class Fingerprint(msgspec.Struct, frozen=True):
    """What two engines must agree on before a page of one means anything to the other."""

    model: str
    weights: str  # digest of the model's configuration and weight index
    dtype: str
    layout: str  # id of the page's byte order, e.g. "page-major/row"
    page_size: int  # tokens
    page_bytes: int
    layers: int
    kv_heads: int
    head_dim: int
    ranks: int = 1
    direction: Literal["push", "pull"] = "push"  # who moves the pages: prefill writes them, or decode reads them

    def difference(self, other: Fingerprint) -> str | None:
        """The first field that differs as `name: mine != theirs`, or None."""
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{field}: {mine!r} != {theirs!r}"
        return None


class Limits(msgspec.Struct, frozen=True):
    """What one worker can take. The effective limit of a pair is the minimum of both (guard D3)."""

    context_length: int  # tokens of prompt + answer
    pool_tokens: int
    max_queued: int  # requests held by the worker, waiting ones included
