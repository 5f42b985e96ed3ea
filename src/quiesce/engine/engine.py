"""The engine: a model, its KV pool and a step. Tokens in, tokens out; it knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from quiesce.engine.attention import EXACT_BLOCK
from quiesce.engine.batch import Row, check_rows, plan
from quiesce.engine.config import dtype_of, fingerprint, read_config
from quiesce.engine.errors import EngineError, NonFiniteLogits
from quiesce.engine.kv import KVPool
from quiesce.engine.model import Llama
from quiesce.engine.sampler import Sampled, check_sampling, sample
from quiesce.engine.weights import load_weights


class Engine:
    """One model on one device. Any thread may call `run` or `step`, but only one at a time.

    `deterministic`: the bits of a request's tokens depend neither on what else is in its batches nor on how
    its prompt is cut into chunks. `threads` sets torch's intra-op threads for the whole process.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        page_size: int = 16,
        pool_pages: int = 4096,
        deterministic: bool = False,
        threads: int = 1,
        context_length: int | None = None,
    ) -> None:
        """Load `model_dir` and allocate the pool. Raises EngineError for what cannot be run.

        `context_length` (tokens) may be below the model's own, never above.
        """
        torch.set_num_threads(threads)
        self.model_config = read_config(Path(model_dir))
        self.context_length = context_length or self.model_config.context_length
        if not 0 < self.context_length <= self.model_config.context_length:
            raise EngineError(
                f"context length {self.context_length} is not within the model's {self.model_config.context_length}"
            )
        self.eos_ids = self.model_config.eos_ids
        self.fingerprint = fingerprint(self.model_config, dtype, page_size)
        self.deterministic = deterministic
        self._block = page_size
        if deterministic:
            if EXACT_BLOCK % page_size and page_size % EXACT_BLOCK:
                raise EngineError(f"deterministic: page size {page_size} and {EXACT_BLOCK} must divide evenly")
            self._block = max(page_size, EXACT_BLOCK)
        self._device = torch.device(device)
        self.kv = KVPool(self.model_config, pages=pool_pages, page_size=page_size, dtype=dtype, device=self._device)
        with torch.inference_mode():
            self._model = Llama(
                self.model_config,
                load_weights(self.model_config, self._device, dtype_of(dtype)),
                context_length=self.context_length,
                deterministic=deterministic,
            )

    def step(self, rows: Sequence[Row]) -> list[int | None]:
        """`run`, tokens only."""
        return [None if result is None else result.token for result in self.run(rows)]

    def run(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Compute every row's tokens into its pages and draw a token for each row that asks for one.

        Rows of one and of many tokens may be mixed. A repeated step writes the same. Raises EngineError
        before anything is written when a row is not valid, and NonFiniteLogits after.
        """
        results: list[Sampled | None] = [None] * len(rows)
        samplers, logits = self.logits(rows)
        bad = [number for number, line in zip(samplers, logits, strict=True) if not np.isfinite(line).all()]
        if bad:
            raise NonFiniteLogits(sorted(bad))
        for number, line in zip(samplers, logits, strict=True):
            row = rows[number]
            assert row.sample is not None
            results[number] = sample(line, row.sample, row.end, logprob=row.logprob)
        return results

    def logits(self, rows: Sequence[Row]) -> tuple[list[int], np.ndarray]:
        """As `run`, short of drawing: the indexes of the rows that sample, and float32 [those, vocab]."""
        check_rows(rows, self.model_config, self.kv, self.context_length)
        for row in rows:
            if row.sample is not None:
                check_sampling(row.sample)
        if not rows:
            return [], np.empty((0, self.model_config.vocab_size), np.float32)
        with torch.inference_mode():
            batch = plan(rows, self.kv, deterministic=self.deterministic, block=self._block, device=self._device)
            return batch.samplers, self._model.forward(batch, self.kv).float().cpu().numpy()
