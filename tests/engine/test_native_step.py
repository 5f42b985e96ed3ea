"""The whole native step, every level that this CPU can run, against plain PyTorch and against itself."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.families import VARIANTS, make
from engine.feeding import GREEDY, last_logits, prompt_of, scattered_pages
from engine.test_deterministic import alone, run_mixed
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.native.library import levels
from quiesce.engine.native.model import NativeModel
from tiny_model import make_tiny_llama

STARTS = [(0, 1), (1, 1), (63, 1), (64, 1), (130, 1), (0, 70), (5, 20), (100, 45)]  # and new tokens
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
# heads, KV heads, head_dim, hidden, intermediate, vocabulary, page size
SHAPES = [
    (9, 3, 64, 72, 100, 300, 16),
    (4, 4, 80, 50, 34, 301, 3),
    (7, 1, 96, 64, 130, 512, 1),
    (4, 2, 128, 34, 66, 263, 16),
    (6, 2, 10, 46, 62, 333, 5),
    (150, 1, 2, 64, 64, 260, 16),  # more query heads to a KV head than fit into a tile
]


def mixed_step(engine: Engine, seed: int) -> dict[int, np.ndarray]:
    """Logits of one step of fresh chunks, later chunks and single tokens, on pages in no order, full of rubbish."""
    draw = random.Random(seed)
    free = list(range(engine.kv.pages))
    draw.shuffle(free)
    engine.kv.tensor.fill_(float("nan"))
    rows = []
    for number, (start, count) in enumerate(
        [(0, 1), (1, 1), (63, 1), (64, 1), (130, 1), (0, 70), (5, 20), (100, 45)]
    ):
        prompt = prompt_of(start + count, seed=number, vocab=250)
        pages = [free.pop() for _ in range(-(-len(prompt) // engine.kv.page_size))]
        if start:
            engine.run([Row(prompt[:start], 0, pages)])
        rows.append(Row(prompt[start:], start, pages, GREEDY))
    draw.shuffle(rows)
    samplers, lines = engine.logits(rows)
    return {rows[number].end: line for number, line in zip(samplers, lines, strict=True)}


def plain_of(folder: Path, page_size: int, dtype: str = "float32", quantization: str = "none") -> Engine:
    return make_engine(folder, page_size, "off", dtype, quantization)


def make_engine(
    folder: Path, page_size: int, level: str, dtype: str = "float32", quantization: str = "none", threads: int = 1
) -> Engine:
    return Engine(
        folder,
        dtype=dtype,
        page_size=page_size,
        pool_pages=-(-700 // page_size) + 8,
        quantization=quantization,
        native_level=level,
        threads=threads,
    )


def distance(ours: dict[int, np.ndarray], truth: dict[int, np.ndarray]) -> float:
    """Mean relative error of the rows."""
    assert ours.keys() == truth.keys()
    errors = [np.linalg.norm(ours[end] - truth[end]) / np.linalg.norm(truth[end]) for end in truth]
    return float(np.mean(errors))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_give_the_logits_of_plain_pytorch(tmp_path: Path, shape: tuple[int, ...]) -> None:
    heads, kv_heads, head_dim, hidden, inner, vocab, page_size = shape
    folder = make_tiny_llama(
        tmp_path,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        intermediate=inner,
        vocab=vocab,
        seed=heads,
    )
    plain = mixed_step(plain_of(folder, page_size), seed=1)
    for level in levels():
        ours = mixed_step(make_engine(folder, page_size, level), seed=2)
        for end, line in plain.items():
            np.testing.assert_allclose(ours[end], line, **CLOSE, err_msg=level)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_gives_the_logits_of_plain_pytorch(tmp_path: Path, name: str) -> None:
    make(name, tmp_path, seed=3)
    plain = mixed_step(plain_of(tmp_path, 16), seed=1)
    for level in levels():
        ours = mixed_step(make_engine(tmp_path, 16, level), seed=2)
        for end, line in plain.items():
            np.testing.assert_allclose(ours[end], line, rtol=1e-3, atol=1e-3, err_msg=level)


@pytest.mark.parametrize("level", levels())
def test_bfloat16_is_no_further_from_fp32_than_plain_bfloat16(tmp_path: Path, level: str) -> None:
    folder = make_tiny_llama(tmp_path, heads=9, kv_heads=3, head_dim=64, hidden=96, layers=3)
    truth = mixed_step(plain_of(folder, 16), seed=1)
    plain = distance(mixed_step(plain_of(folder, 16, "bfloat16"), seed=1), truth)
    assert distance(mixed_step(make_engine(folder, 16, level, "bfloat16"), seed=1), truth) < 1.1 * plain


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", levels())
def test_int8_and_int4_are_what_rounded_weights_give(
    tmp_path: Path, level: str, dtype: str, quantization: str
) -> None:
    """The reference computes with the rounded weights in fp32; what bfloat16 adds to that is its own error."""
    make("qwen3 tied, biases", tmp_path, seed=4)
    truth = mixed_step(plain_of(tmp_path, 16, "float32", quantization), seed=1)
    ours = mixed_step(make_engine(tmp_path, 16, level, dtype, quantization), seed=1)
    if dtype == "float32":
        for end, line in truth.items():
            np.testing.assert_allclose(ours[end], line, rtol=1e-3, atol=1e-3)
    else:
        assert distance(ours, truth) < 1.1 * distance(
            mixed_step(plain_of(tmp_path, 16, dtype, quantization), seed=1), truth
        )
    unrounded = mixed_step(plain_of(tmp_path, 16), seed=1)
    assert 1e-3 < distance(truth, unrounded) < {"int8": 0.1, "int4": 0.5}[quantization]


@pytest.mark.parametrize("level", levels())
def test_int4_beside_an_inner_size_that_fills_no_group(tmp_path: Path, level: str) -> None:
    """What is behind a row is multiplied with weights that are not zero: it has to be."""
    folder = make_tiny_llama(tmp_path, heads=3, kv_heads=1, head_dim=10, hidden=34, intermediate=61, seed=2)
    truth = mixed_step(plain_of(folder, 16, "float32", "int4"), seed=1)
    ours = mixed_step(make_engine(folder, 16, level, "float32", "int4"), seed=1)
    for end, line in truth.items():
        np.testing.assert_allclose(ours[end], line, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
    ids=str,
)
@pytest.mark.parametrize("level", levels())
def test_company_and_chunks_do_not_change_a_bit(tmp_path: Path, level: str, dtype: str, quantization: str) -> None:
    folder = make_tiny_llama(tmp_path, heads=6, kv_heads=2, head_dim=24, seed=6)
    engine = make_engine(folder, 3, level, dtype, quantization)
    prompts = [prompt_of(n, seed=n) for n in (1, 2, 16, 63, 64, 65, 130, 200)]
    expected = [alone(engine, prompt) for prompt in prompts]
    assert run_mixed(engine, prompts, random.Random(5)) == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 64), (4, 2, 48), (9, 3, 64), (4, 1, 128), (7, 1, 80), (8, 1, 32), (9, 1, 16)],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_few_rows_are_looked_at_in_another_way_to_the_same_bits(
    tmp_path: Path, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    folder = make_tiny_llama(tmp_path, heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=2, seed=heads)
    engine = make_engine(folder, page_size, "auto", "bfloat16")
    prompts = [prompt_of(n, seed=n) for n in (7, 24, 64, 65, 130, 200)]
    expected = [alone(engine, prompt) for prompt in prompts]
    for seed in range(3):
        assert run_mixed(engine, prompts, random.Random(seed)) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_do_not_change_a_bit(tmp_path: Path, dtype: str) -> None:
    folder = make_tiny_llama(tmp_path, heads=6, kv_heads=3, head_dim=32, vocab=301)
    one, three = (make_engine(folder, 16, "auto", dtype, threads=count) for count in (1, 3))
    for seed in range(3):
        ours, theirs = mixed_step(one, seed), mixed_step(three, seed)
        assert all(np.array_equal(ours[end], theirs[end]) for end in ours | theirs)


def test_a_page_size_that_plain_pytorch_cannot_have_deterministic(tmp_path: Path) -> None:
    engine = Engine(make_tiny_llama(tmp_path), dtype="float32", page_size=48, pool_pages=8, deterministic=True)
    prompt = prompt_of(100)
    whole = last_logits(engine, prompt, [100], scattered_pages(engine, 100))
    assert np.array_equal(last_logits(engine, prompt, [33, 66, 1], [5, 6, 7]), whole)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("threads", [1, 3])
def test_states_that_are_needed_are_those_of_a_step_that_makes_all(tmp_path: Path, level: str, threads: int) -> None:
    """The last layer leaves out the others, whose keys and values are written all the same."""
    folder = make_tiny_llama(tmp_path, heads=6, kv_heads=3, head_dim=32, layers=2, vocab=301)
    engine = make_engine(folder, 16, level, "bfloat16", threads=threads)
    model = engine._model
    assert isinstance(model, NativeModel)
    counts, needed = [70, 1, 3, 130, 1, 5], np.array([1, 1, 0, 2, 0, 5])
    rows = [Row(prompt_of(n, seed=n + at, vocab=250), 0, range(9 * at, 9 * at + 9)) for at, n in enumerate(counts)]
    flat = model.plan(rows, engine.kv)
    made = []
    for wanted in (None, needed, np.zeros_like(needed)):
        engine.kv.tensor.fill_(float("nan"))
        hidden = model.forward(replace(flat, needed=wanted), engine.kv)
        written = engine.kv.tensor[[page for row in rows for page in row.pages[: -(-row.end // 16)]]]
        assert written.isfinite().all()
        made.append((hidden, written.clone()))
    (whole, all_written), (some, some_written), (_, none_written) = made
    assert torch.equal(all_written, some_written) and torch.equal(all_written, none_written)
    for end, count in zip(np.cumsum(counts), needed, strict=True):
        assert torch.equal(whole[end - count : end], some[end - count : end])
    first_of_all = counts[0] - 2  # not needed, and not made
    assert not torch.equal(whole[first_of_all], some[first_of_all])
