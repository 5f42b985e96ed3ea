"""Is it right on this device? Against float64 on the CPU: attention, logits, greedy tokens; then the mirror."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.gpu_models import PAGE, shaped
from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.gpu import choice
from quiesce.engine.gpu.flashinfer_attention import Unfit
from quiesce.engine.local import LocalEngine
from quiesce.engine.model import Model

LOGITS = {"float32": 1e-3, "bfloat16": 6e-2}  # largest error, relative to the largest logit
HEADS = {
    "grouped by 4": (32, 8, 128),
    "grouped by 3": (9, 3, 64),
    "alone": (4, 4, 80),
    "one of 256": (8, 1, 256),
    "small": (3, 1, 16),
}


@dataclass(frozen=True)
class Check:
    what: str
    right: bool | None  # None: cannot be had here, which is no fault
    found: str

    def text(self) -> str:
        return f"  {'-' if self.right is None else 'ok' if self.right else 'WRONG'}  {self.what}: {self.found}"


def attention(backend: str, device: torch.device, shapes: Sequence[str] = tuple(HEADS)) -> Iterator[Check]:
    """On scratch memory, page sizes of 16 and 5."""
    for shape in shapes:
        heads, kv_heads, dim = HEADS[shape]
        sizes = {"hidden_size": heads * dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        config = shaped(
            {**sizes, "head_dim": dim, "vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}, 64
        )
        for dtype, limit in choice.TOLERANCE.items():
            name = f"attention by {backend}, {shape}, {str(dtype).removeprefix('torch.')}"
            try:
                errors = [
                    choice.trial(choice.MAKE[backend](config, page, device, dtype), config, page, device, dtype)
                    for page in (16, 5)
                ]
            except Unfit as unfit:
                yield Check(name, None, str(unfit))
                continue
            except Exception as error:
                yield Check(name, False, f"{type(error).__name__}: {error}"[:300])
                continue
            yield Check(name, max(errors) <= limit, f"largest error {max(errors):.1e}, limit {limit:g}")


class Exact:
    """The model in float64 by transformers, on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float64 [tokens, vocab]."""
        with torch.inference_mode():
            found: np.ndarray = self._model(torch.tensor([list(tokens)])).logits[0].numpy()
        return found


def prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(4, vocab, length).tolist() for length in lengths]


def whole_model(
    folder: Path, exact: Exact, device: str, dtype: str, lengths: Sequence[int], answer: int, backend: str = "auto"
) -> Iterator[Check]:
    """Logits of prompts cut into chunks, then greedy answers, several at once, each token held against float64."""
    pages = 4 * -(-(max(lengths) + answer + PAGE) // PAGE) + 16
    longest = max(lengths) + answer + 1
    engine = Engine(
        folder,
        device=device,
        dtype=dtype,
        page_size=PAGE,
        pool_pages=pages,
        attention=backend,
        context_length=longest,
    )
    yield Check(f"engine, {dtype}", None, engine.how)
    asked = prompts(engine.model_config.vocab_size, lengths)
    worst = 0.0
    for prompt in asked:
        own = range(pages)[3 : 3 + -(-len(prompt) // PAGE)]
        cut = len(prompt) // 3
        engine.run([Row(prompt[:cut], 0, own)] if cut else [])
        _, got = engine.logits([Row(prompt[cut:], cut, own, Sampling(max_tokens=1))])
        want = exact.logits(prompt)[-1]
        worst = max(worst, float(np.abs(got[0] - want).max() / np.abs(want).max()))
    yield Check(f"logits, {dtype}", worst <= LOGITS[dtype], f"relative error {worst:.1e}, limit {LOGITS[dtype]:g}")
    wish = [Sampling(max_tokens=answer, ignore_eos=True)] * len(asked)
    behind, same, total = 0.0, 0, 0
    for prompt, tokens in zip(asked, LocalEngine(engine).generate(asked, wish, chunk=64), strict=True):
        lines = exact.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = lines[np.arange(len(tokens)), tokens]
        behind = max(behind, float(((lines.max(-1) - chosen) / np.abs(lines).max(-1)).max()))
        same += int((lines.argmax(-1) == tokens).sum())
        total += len(tokens)
    limit = 2 * LOGITS[dtype]
    found = f"{same} of {total} are float64's choice; the worst is {behind:.1e} behind it, limit {limit:g}"
    yield Check(f"greedy tokens, {dtype}", behind <= limit, found)
    graphs = engine._model.graphs if isinstance(engine._model, Model) else None
    if graphs is not None:
        yield Check(f"CUDA graphs, {dtype}", graphs.replays > 0, f"{graphs.replays} of these steps were replayed")


def mirrored(folder: Path, device: str, backend: str = "auto") -> Check:
    """A prompt's pages from one pool, over two mirrors, into another: the next token's logits are the same bits."""
    sizes = {"page_size": PAGE, "pool_pages": 16, "context_length": 128, "dtype": "float32", "device": device}
    source, target = (
        Engine(folder, attention=backend, staging=kind, cuda_graphs=False, **sizes)  # type: ignore[arg-type]
        for kind in ("source", "target")
    )
    prompt, pages, theirs = prompts(300, [70])[0], [9, 2, 7, 1, 5], [0, 11, 3, 8, 12]
    source.run([Row(prompt, 0, theirs)])
    target.kv.arena.pages[pages] = source.kv.arena.pages[theirs]
    wish = Sampling(max_tokens=1)
    _, want = source.logits([Row([5], 70, theirs, wish)])
    _, got = target.logits([Row([5], 70, pages, wish, landed=pages)])
    mirror = target.kv.mirror
    pinned = "pinned" if mirror is not None and mirror.pinned else "not pinned"
    return Check("hand-off over mirrors", bool((want == got).all()), f"same bits expected; {pinned}")
