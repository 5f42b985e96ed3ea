"""What the engine refuses, in words for people."""

from __future__ import annotations

from collections.abc import Sequence


class EngineError(ValueError):
    """A model folder, a setting or a row that this engine cannot run. The text says what to change."""


class NonFiniteLogits(EngineError):
    """The model gave NaN or infinite logits for some rows of a step.

    `rows` are their indexes in the step. A step may be repeated without them: what the other rows wrote is
    written again, bit for bit, in the same slots.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"the model gave non-finite logits for rows {list(rows)} of this step; end those requests and repeat"
            " the step without them (float32 instead of bfloat16 may help)"
        )
        self.rows = tuple(rows)
