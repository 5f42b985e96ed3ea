"""The engine: a model, its KV pool and a step. Tokens in, tokens out; it knows nothing of requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch

from quiesce.core.messages import Sampling, TokenLogprob
from quiesce.engine.batch import Batch, Row, check_rows, plainly_sound
from quiesce.engine.config import dtype_of, read_config
from quiesce.engine.drawing import Drawer
from quiesce.engine.errors import EngineError, NonFiniteLogits
from quiesce.engine.fingerprint import fingerprint
from quiesce.engine.gpu.choice import Choice, device_of
from quiesce.engine.gpu.choice import choose as choose_attention
from quiesce.engine.gpu.graphs import SIZES, CudaRecorder, on
from quiesce.engine.grammar import Grammars
from quiesce.engine.kv import KVPool, Staging
from quiesce.engine.logprobs import token_logprob
from quiesce.engine.model import Model
from quiesce.engine.native.decode_loop import DecodeLoop
from quiesce.engine.native.library import AUTO, Bounds, Peaks, choose
from quiesce.engine.native.model import Flat, NativeModel
from quiesce.engine.quantize import QUANTIZATIONS, round_to
from quiesce.engine.sampler import Sampled
from quiesce.engine.seats import Seats, check_seats
from quiesce.engine.weights import load_weights

log = logging.getLogger("quiesce.engine")

SCORED_AT_ONCE = 64  # positions whose logits are held at a time for prompt log-probabilities


class Result(msgspec.Struct, frozen=True):
    """What a row gave: `sampled` if it asked for a token, `prompt_logprobs` of the positions from start + 1."""

    sampled: Sampled | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


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
        quantization: str = "none",
        native_level: str = AUTO,
        attention: str = AUTO,
        cuda_graphs: bool = True,
        staging: Staging = "none",
    ) -> None:
        """Load `model_dir` and allocate the pool. Raises EngineError for what cannot be run.

        `context_length` (tokens) may be below the model's own, never above. `quantization` is one of
        QUANTIZATIONS, `native_level` as in `native.library.choose`; `how` then says which step it is. `attention`,
        one of `gpu.choice.BACKENDS`, and `cuda_graphs` are for devices; on the CPU a backend that is named runs in
        the plain step. `staging`: what transports do with a pool in device memory, see `KVPool`.
        """
        torch.set_num_threads(threads)
        self.model_config = read_config(Path(model_dir))
        self.context_length = context_length or self.model_config.context_length
        if not 0 < self.context_length <= self.model_config.context_length:
            raise EngineError(
                f"context length {self.context_length} is not within the model's {self.model_config.context_length}"
            )
        self.eos_ids = self.model_config.eos_ids
        if quantization not in QUANTIZATIONS:
            raise EngineError(f"quantization {quantization!r} is none of {', '.join(QUANTIZATIONS)}")
        self.fingerprint = fingerprint(self.model_config, dtype, page_size, quantization)
        self.deterministic, self._device = deterministic, device_of(device)
        if deterministic and attention != AUTO:
            raise EngineError(
                f"deterministic: it has an attention of its own, not {attention}; leave out one of them"
            )
        paged = not deterministic and (self._device.type != "cpu" or attention != AUTO)
        native_library, self.how = choose(native_level, self._device.type) if not paged else (None, "")
        self._drawer = Drawer(self.model_config.vocab_size, self.eos_ids, native_library)
        self.grammars = Grammars(Path(model_dir), self.model_config.vocab_size, self.eos_ids)
        self.kv = KVPool(
            self.model_config,
            pages=pool_pages,
            page_size=page_size,
            dtype=dtype,
            device=self._device,
            staging=staging,
            apart=paged,
        )
        self._model: Model | NativeModel
        with torch.inference_mode(), on(self._device):
            weights = load_weights(self.model_config, self._device, dtype_of(dtype))
            sizes = {"context_length": self.context_length, "page_size": page_size}
            if native_library is not None:
                self._model = NativeModel(
                    native_library, self.model_config, weights, quantization=quantization, threads=threads, **sizes
                )
            else:
                if quantization != "none":
                    round_to(quantization, weights)
                chosen = choose_attention(attention, self.model_config, page_size, weights) if paged else None
                self._model = Model(
                    self.model_config,
                    weights,
                    deterministic=deterministic,
                    paged=chosen.attention if chosen else None,
                    **sizes,
                )
                if native_library is None and not self.how:
                    self.how = f"PyTorch on {device}, {chosen.how if chosen else 'attention that is deterministic'}"
                if chosen is not None and self._device.type == "cuda":
                    self.how += f"; {self._graphs(chosen, cuda_graphs)}"

    def _graphs(self, chosen: Choice, wanted: bool) -> str:
        """What came of recording the decode step, for people."""
        if not wanted or chosen.decode is None:
            return "no CUDA graphs: " + ("not wanted" if chosen.decode else f"none can hold {chosen.attention.name}")
        assert isinstance(self._model, Model)
        try:
            self._model.record(self.kv, chosen.decode, CudaRecorder(self._device))
        except Exception as error:  # whatever a driver or a kernel that cannot be captured raises
            self._model.graphs = None
            log.warning("the decode step runs without CUDA graphs", exc_info=error)
            return f"no CUDA graphs: recording failed: {type(error).__name__}: {error}"[:300]
        return f"CUDA graphs of up to {SIZES[-1]} rows with {chosen.decode.name}"

    @property
    def native(self) -> bool:
        """Whether the native step runs, and not plain PyTorch."""
        return isinstance(self._model, NativeModel)

    def step(self, rows: Sequence[Row]) -> list[int | None]:
        """`run`, drawn tokens only."""
        return [result.sampled.token if result.sampled else None for result in self.run(rows)]

    def run(self, rows: Sequence[Row]) -> list[Result]:
        """Compute every row's tokens into its pages; draw a token for each row that asks for one.

        Rows of one and of many tokens may be mixed. A repeated step writes the same. Raises EngineError
        before anything is written when a row is not valid, and NonFiniteLogits after.
        """
        self._check(rows)
        if not rows:
            return []
        with torch.inference_mode(), self._under_way():
            batch, hidden = self._forward(rows)
            results, bad = self._results(rows, batch, hidden, *self._lines(batch, hidden))
        if bad:
            raise NonFiniteLogits(sorted(bad))
        return results

    def run_seated(self, seats: Seats, rows: Sequence[Row]) -> tuple[np.ndarray, list[Result]]:
        """A step of everyone who sits and of `rows`: a token for each seat, and what `run` returns for the rows. Rows
        that are not finite are counted behind the seats."""
        n = len(seats)
        if isinstance(self._model, Model):
            results = self.run([*seats.rows(), *rows])
            return np.array([result.sampled.token for result in results[:n] if result.sampled], np.int64), results[n:]
        if rows:
            self._check(rows)
        about = (self.model_config, self.kv, self.context_length)
        check_seats(seats, rows, *about, self._model.library)
        # It is over when it returns, and has no gradients: it needs none of what surrounds a step in PyTorch.
        batch = self._model.plan(rows, self.kv, seats)
        hidden = self._model.forward(batch, self.kv)
        lines, peaks = self._model.logits_and_peaks(_wanted(batch, hidden))
        tokens, finite = self._drawer.draw_seated(seats, lines, peaks)
        results, bad = list[Result](), set[int]()
        if rows:
            results, bad = self._results(rows, batch, hidden, lines.numpy()[n:], peaks.behind(n))
        if bad or not finite:
            raise NonFiniteLogits([*np.flatnonzero(tokens < 0).tolist(), *(n + number for number in sorted(bad))])
        return tokens, results

    def decode_loop(self, done: int) -> DecodeLoop | None:
        """Makes what `run_seated` makes of seats alone, without Python. None: this engine has no such loop.
        `done`: an eventfd, written when a step has ended."""
        if isinstance(self._model, Model):
            return None
        bounds = Bounds(self.model_config.vocab_size, self.context_length, self.kv.pages)
        return self._model.decode_loop(self.kv, bounds, done)

    def _results(
        self,
        rows: Sequence[Row],
        batch: Batch | Flat,
        hidden: torch.Tensor,
        lines: np.ndarray,
        peaks: Peaks | None,
    ) -> tuple[list[Result], set[int]]:
        """What the rows gave, and those of them that are not finite."""
        wanting = [rows[number] for number in batch.samplers]
        drawn = dict(zip(batch.samplers, self._drawer.draw(wanting, lines, peaks), strict=True))
        bad = {number for number, sampled in drawn.items() if sampled is None}
        scores = {n: self._prompt_logprobs(row, n, batch, hidden, bad) for n, row in enumerate(rows) if row.scored}
        return [Result(drawn.get(n), scores.get(n, ())) for n in range(len(rows))], bad

    def logits(self, rows: Sequence[Row]) -> tuple[list[int], np.ndarray]:
        """As `run`, short of drawing: the indexes of the rows that sample, and float32 [those, vocab]."""
        self._check(rows)
        if not rows:
            return [], np.empty((0, self.model_config.vocab_size), np.float32)
        with torch.inference_mode(), self._under_way():
            batch, hidden = self._forward(rows)
            return batch.samplers, self._lines(batch, hidden)[0]

    def warm_up(self, tokens: int = 512) -> None:
        """Run a prompt of up to `tokens` (a page with the native step) and a few single tokens, so that the first
        request does not pay for it.

        It writes the pool's first pages and zeroes them: call it before any page is in use.
        """
        size = self.kv.page_size
        if self.native:  # it has no kernels to choose or to compile for a size: a page's worth touches all of it
            tokens = size
        tokens = min(tokens, self.context_length - 1, self.kv.pages * size - 1)
        if tokens < 1:
            return
        pages = list(range(-(-(tokens + 1) // size)))
        wish = Sampling(max_tokens=2, temperature=1.0, top_p=0.9)
        self.run([Row([0] * tokens, 0, pages, wish)])
        self.run([Row([0], tokens, pages, wish)])
        self.run([Row([0], 0, [page], wish) for page in pages])
        with torch.inference_mode():
            self.kv.clear(torch.tensor(pages, device=self._device))

    def _check(self, rows: Sequence[Row]) -> None:
        about = (self.model_config, self.kv, self.context_length)
        if not plainly_sound(rows, *about):
            check_rows(rows, *about)
        for row in rows:
            if row.sample is not None:
                self._drawer.kind(row.sample)

    def _forward(self, rows: Sequence[Row]) -> tuple[Batch | Flat, torch.Tensor]:
        if isinstance(self._model, NativeModel):
            flat = self._model.plan(rows, self.kv)
            return flat, self._model.forward(flat, self.kv)
        if self.kv.mirror is None:
            batch = self._model.plan(rows, self.kv)
            return batch, self._model.forward(batch, self.kv)
        for row in rows:
            self.kv.fetch(row.landed)
        batch = self._model.plan(rows, self.kv)
        hidden = self._model.forward(batch, self.kv)
        size = self.kv.page_size
        for row in rows:
            self.kv.publish(row.pages[row.start // size : -(-row.end // size)])
        return batch, hidden

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """A step ends when the device has ended it, however it ends: only then are its pages written, and only then
        may they be given to somebody else (guards L1 and D2)."""
        with on(self._device):
            try:
                yield
            finally:
                self.kv.finish()

    def _lines(self, batch: Batch | Flat, hidden: torch.Tensor) -> tuple[np.ndarray, Peaks | None]:
        """Logits of those that draw, in the order of their rows, and their peaks where the step finds them."""
        wanted = _wanted(batch, hidden)
        if isinstance(self._model, Model):
            return _as_numpy(self._model.logits(wanted)), None
        lines, peaks = self._model.logits_and_peaks(wanted)
        return lines.numpy(), peaks

    def _prompt_logprobs(
        self, row: Row, number: int, batch: Batch | Flat, hidden: torch.Tensor, bad: set[int]
    ) -> tuple[TokenLogprob, ...]:
        """Of history[start + 1 :][:scored]. A few positions at a time: logits of a whole chunk would be large."""
        assert row.prompt_logprobs is not None
        first, scores = batch.firsts[number], list[TokenLogprob]()
        for at in range(0, row.scored, SCORED_AT_ONCE):
            count = min(SCORED_AT_ONCE, row.scored - at)
            lines = _as_numpy(self._model.logits(hidden[first + at : first + at + count]))
            if not np.isfinite(lines).all():
                bad.add(number)
                break
            following = row.history[row.start + at + 1 : row.start + at + 1 + count]
            scores += [
                token_logprob(line, token, row.prompt_logprobs) for line, token in zip(lines, following, strict=True)
            ]
        return tuple(scores)


def _wanted(batch: Batch | Flat, hidden: torch.Tensor) -> torch.Tensor:
    """The hidden states of those that draw."""
    all_draw = batch.wanted is None or len(batch.wanted) == len(hidden)
    return hidden if all_draw else hidden[batch.wanted]


def _as_numpy(logits: torch.Tensor) -> np.ndarray:
    return logits.float().cpu().numpy()
