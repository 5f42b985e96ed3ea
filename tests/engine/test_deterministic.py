"""deterministic: bits depend neither on chunking nor on what else is in the batch."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.feeding import GREEDY, last_logits, prompt_of
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.model import Model
from tiny_model import make_tiny_llama


def plain_model(engine: Engine) -> Model:
    assert isinstance(engine._model, Model)
    return engine._model


def random_chunks(draw: random.Random, length: int) -> list[int]:
    largest = draw.choice([1, 3, 8, 70, length])
    chunks: list[int] = []
    while (left := length - sum(chunks)) > 0:
        chunks.append(min(left, draw.randint(1, largest)))
    return chunks


def stored(engine: Engine, pages: list[int], tokens: int) -> np.ndarray:
    """The KV bits of the first `tokens` positions: [tokens, layers, 2, kv_heads, head_dim]."""
    run = engine.kv.tensor[pages].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[:tokens]
    return run.contiguous().view(torch.uint8).numpy()


def run_mixed(engine: Engine, prompts: list[list[int]], draw: random.Random) -> list[tuple[bytes, bytes]]:
    """All prompts in random chunks and random company; per prompt its last logits and stored KV, as bytes."""
    free = list(range(engine.kv.pages))
    draw.shuffle(free)
    size = engine.kv.page_size
    tables = [[free.pop() for _ in range(-(-len(prompt) // size))] for prompt in prompts]
    plans = [random_chunks(draw, len(prompt)) for prompt in prompts]
    done, logits = [0] * len(prompts), [b""] * len(prompts)
    while left := [i for i, plan in enumerate(plans) if plan]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        rows = []
        for i in chosen:
            count = plans[i].pop(0)
            rows.append(Row(prompts[i][done[i] : done[i] + count], done[i], tables[i], GREEDY))
            done[i] += count
        samplers, lines = engine.logits(rows)
        for number, line in zip(samplers, lines, strict=True):
            logits[chosen[number]] = line.tobytes()
    return [(logits[i], stored(engine, tables[i], len(prompt)).tobytes()) for i, prompt in enumerate(prompts)]


def alone(engine: Engine, prompt: list[int]) -> tuple[bytes, bytes]:
    pages = list(range(-(-len(prompt) // engine.kv.page_size)))
    logits = last_logits(engine, prompt, [len(prompt)], pages)
    return logits.tobytes(), stored(engine, pages, len(prompt)).tobytes()


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 2)])
def test_random_chunkings_and_companies_give_the_same_bits(
    tmp_path: Path, native: str, dtype: str, heads: tuple[int, int]
) -> None:
    folder = make_tiny_llama(tmp_path, heads=heads[0], kv_heads=heads[1], seed=heads[0])
    engine = Engine(folder, dtype=dtype, page_size=16, pool_pages=128, deterministic=True, native_level=native)
    prompts = [prompt_of(n, seed=n) for n in (1, 2, 16, 63, 64, 65, 130, 200)]
    expected = [alone(engine, prompt) for prompt in prompts]
    for seed in range(4):
        assert run_mixed(engine, prompts, random.Random(seed)) == expected


@pytest.mark.parametrize("native", ["auto", "off"])
def test_the_real_models_dimensions_give_the_same_bits(tmp_path: Path, native: str) -> None:
    """Two layers of SmolLM2-135M's shape, without its vocabulary."""
    folder = make_tiny_llama(
        tmp_path, layers=2, heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536, context=1024
    )
    engine = Engine(folder, dtype="float32", page_size=16, pool_pages=128, deterministic=True, native_level=native)
    prompts = [prompt_of(n, seed=n) for n in (3, 100, 420)]
    expected = [alone(engine, prompt) for prompt in prompts]
    for seed in (0, 3):
        assert run_mixed(engine, prompts, random.Random(seed)) == expected


def test_the_fast_way_is_not_bit_exact_so_the_tests_above_can_fail(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    engine = Engine(folder, dtype="float32", page_size=16, pool_pages=128, native_level="off")
    prompt = prompt_of(130, seed=1)
    whole = last_logits(engine, prompt, [130], list(range(9)))
    single = last_logits(engine, prompt, [1] * 130, list(range(9)))
    assert not np.array_equal(whole, single)
    np.testing.assert_allclose(whole, single, rtol=1e-3, atol=1e-3)


def test_a_page_size_that_does_not_divide_the_block_is_refused(tiny: Path) -> None:
    with pytest.raises(EngineError, match="page size 48"):
        Engine(tiny, dtype="float32", page_size=48, pool_pages=8, deterministic=True, native_level="off")


def test_a_product_that_rounds_by_row_count_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own products of one row do round differently in fp32: probing them must be noticed."""
    monkeypatch.setattr("quiesce.engine.model.PROBE_ROWS", (1, 64))
    monkeypatch.setattr("quiesce.engine.model.packable", lambda matrix: False)
    with pytest.raises(EngineError, match="rounds differently"):
        Engine(tiny, dtype="float32", pool_pages=8, deterministic=True, native_level="off")


def test_packed_matrices_that_round_by_row_count_are_not_used(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the packed layout fails its probe, the plain matrices are taken, provided that they pass."""
    monkeypatch.setattr(
        "quiesce.engine.model.rows_that_differ", lambda matrix, plain, bias: 4 if matrix is not plain else None
    )
    engine = Engine(tiny, dtype="float32", pool_pages=8, deterministic=True, native_level="off")
    assert not plain_model(engine).weights.head.is_mkldnn


def test_matrices_are_all_probed(plain_exact_engine: Engine) -> None:
    weights = plain_model(plain_exact_engine).weights
    assert len(list(weights.products())) == 4 * len(weights.layers) + 1
