"""Logits against transformers in fp32, around page and chunk boundaries, prefill and decode."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.feeding import GREEDY, last_logits, prompt_of, scattered_pages
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from tiny_model import make_tiny_llama

EVERY = ["engine", "plain_engine", "plain_exact_engine"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def expected(reference: LlamaForCausalLM, prompt: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return reference(torch.tensor([prompt])).logits[0].numpy()


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("which", EVERY)
def test_a_whole_prompt_gives_the_logits_of_transformers(
    request: pytest.FixtureRequest, reference: LlamaForCausalLM, which: str, length: int
) -> None:
    engine: Engine = request.getfixturevalue(which)
    prompt = prompt_of(length, seed=length)
    logits = last_logits(engine, prompt, [length], scattered_pages(engine, length))
    np.testing.assert_allclose(logits, expected(reference, prompt)[-1], **CLOSE)


@pytest.mark.parametrize("which", EVERY)
@pytest.mark.parametrize(
    "chunks", [[16, 16, 1], [15, 2, 16], [1, 1, 1, 30], [64, 64, 5], [100, 28, 1], [7] * 19, [1] * 33]
)
def test_a_chunked_prompt_gives_the_logits_of_transformers(
    request: pytest.FixtureRequest, reference: LlamaForCausalLM, which: str, chunks: list[int]
) -> None:
    engine: Engine = request.getfixturevalue(which)
    prompt = prompt_of(sum(chunks), seed=7)
    logits = last_logits(engine, prompt, chunks, scattered_pages(engine, len(prompt), seed=3))
    np.testing.assert_allclose(logits, expected(reference, prompt)[-1], **CLOSE)


@pytest.mark.parametrize("which", EVERY)
def test_every_row_of_a_mixed_step_gives_the_logits_of_transformers(
    request: pytest.FixtureRequest, reference: LlamaForCausalLM, which: str
) -> None:
    """Very different lengths (more than one decode group), fresh chunks, later chunks and single tokens."""
    engine: Engine = request.getfixturevalue(which)
    done = [0, 5, 16, 200, 31, 300, 0, 17, 64]
    new = [1, 1, 1, 1, 20, 1, 33, 64, 1]
    free = list(range(engine.kv.pages))
    prompts, rows = [], []
    for number, (start, count) in enumerate(zip(done, new, strict=True)):
        prompt = prompt_of(start + count, seed=number)
        pages = [free.pop() for _ in range(-(-len(prompt) // engine.kv.page_size))]
        if start:
            engine.step([Row(prompt[:start], 0, pages)])
        prompts.append(prompt)
        rows.append(Row(prompt[start:], start, pages, None if number == 4 else GREEDY))
    samplers, logits = engine.logits(rows)
    assert sorted(samplers) == [0, 1, 2, 3, 5, 6, 7, 8]
    for number, line in zip(samplers, logits, strict=True):
        np.testing.assert_allclose(line, expected(reference, prompts[number])[-1], **CLOSE)
    tokens = engine.step(rows)
    assert tokens[4] is None
    assert tokens[3] == int(expected(reference, prompts[3])[-1].argmax())


@pytest.mark.parametrize("which", EVERY)
def test_rubbish_in_pages_of_others_and_in_unused_slots_changes_nothing(
    request: pytest.FixtureRequest, which: str
) -> None:
    engine: Engine = request.getfixturevalue(which)
    prompt, pages = prompt_of(50), [9, 3, 60, 2]
    clean = last_logits(engine, prompt, [30, 19, 1], pages)
    engine.kv.tensor.fill_(float("nan"))
    try:
        assert np.array_equal(last_logits(engine, prompt, [30, 19, 1], pages), clean)
    finally:
        engine.kv.tensor.zero_()


@pytest.mark.parametrize("page_size", [1, 8, 32, 128])
def test_the_page_size_does_not_matter(tiny: Path, reference: LlamaForCausalLM, page_size: int) -> None:
    prompt = prompt_of(130, seed=2)
    for native, deterministic in (("auto", False), ("off", False), ("off", True)):
        engine = Engine(
            tiny,
            dtype="float32",
            page_size=page_size,
            pool_pages=300 // page_size + 1,
            deterministic=deterministic,
            native_level=native,
        )
        logits = last_logits(engine, prompt, [100, 29, 1], scattered_pages(engine, 130))
        np.testing.assert_allclose(logits, expected(reference, prompt)[-1], **CLOSE)


def test_tied_heads_more_groups_and_llama3_scaling_agree_with_transformers(tmp_path: Path) -> None:
    scaling: dict[str, object] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = make_tiny_llama(tmp_path, heads=6, kv_heads=2, hidden=96, tied=True, layers=3, rope_scaling=scaling)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = Engine(folder, dtype="float32", pool_pages=32)
    prompt = prompt_of(150, seed=5)
    logits = last_logits(engine, prompt, [90, 59, 1], scattered_pages(engine, 150))
    np.testing.assert_allclose(logits, expected(theirs, prompt)[-1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("native", "deterministic"), [("auto", False), ("off", False), ("off", True)])
def test_bfloat16_is_as_close_to_fp32_as_that_of_transformers(
    tiny: Path, reference: LlamaForCausalLM, native: str, deterministic: bool
) -> None:
    engine = Engine(tiny, dtype="bfloat16", pool_pages=32, deterministic=deterministic, native_level=native)
    theirs = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()
    ours = peer = 0.0
    for seed in range(8):
        prompt = prompt_of(100, seed=seed)
        truth = expected(reference, prompt)[-1]
        logits = last_logits(engine, prompt, [60, 39, 1], scattered_pages(engine, 100))
        with torch.inference_mode():
            bf16 = theirs(torch.tensor([prompt])).logits[0, -1].float().numpy()
        ours += float(np.linalg.norm(logits - truth) / np.linalg.norm(truth))
        peer += float(np.linalg.norm(bf16 - truth) / np.linalg.norm(truth))
    assert ours < 1.25 * peer
