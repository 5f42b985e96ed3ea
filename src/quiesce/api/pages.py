"""Bodies of the pages that are no generation, and of errors."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True):
    """`max_model_len`: tokens of prompt and answer together, the least of context and pools over the usable workers;
    null while there are none."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: Literal["quiesce"] = "quiesce"


class Models(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Readiness(msgspec.Struct, frozen=True):
    """Whether a request would be taken now; if not, why."""

    ready: bool
    reason: str


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail
