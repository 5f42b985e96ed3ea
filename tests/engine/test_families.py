"""Llama 3, Mistral, Qwen2 and Qwen3 against transformers in fp32: logits, greedy answers, and exact bits."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine import families
from engine.feeding import last_logits, prompt_of, scattered_pages
from engine.test_deterministic import alone, run_mixed
from engine.test_local import greedy_by_transformers
from quiesce.core.messages import Sampling
from quiesce.engine.config import read_config
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.local import LocalEngine

Pair = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=list(families.VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("family")
    yield folder, families.make(request.param, folder)


@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_and_greedy_answers_equal_those_of_transformers(pair: Pair, deterministic: bool) -> None:
    folder, theirs = pair
    engine = Engine(folder, dtype="float32", pool_pages=64, deterministic=deterministic)
    for number, chunks in enumerate(([1], [130], [16, 1, 60, 53], [1] * 18)):
        prompt = prompt_of(sum(chunks), seed=number)
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0, -1].numpy()
        logits = last_logits(engine, prompt, chunks, scattered_pages(engine, len(prompt), seed=number))
        assert np.ptp(expected) > 3
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=3e-4)
    prompts = [prompt_of(n, seed=n) for n in (1, 17, 100)]
    wish = Sampling(16, ignore_eos=True)
    answers = LocalEngine(engine).generate(prompts, [wish] * 3, chunk=24, concurrency=3)
    assert answers == [greedy_by_transformers(theirs, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_chunkings_and_companies_give_the_same_bits(pair: Pair, dtype: str) -> None:
    engine = Engine(pair[0], dtype=dtype, page_size=16, pool_pages=64, deterministic=True)
    prompts = [prompt_of(n, seed=n) for n in (1, 2, 16, 65, 130)]
    expected = [alone(engine, prompt) for prompt in prompts]
    for seed in range(2):
        assert run_mixed(engine, prompts, Random(seed)) == expected


def test_bfloat16_is_as_close_to_fp32_as_that_of_transformers(pair: Pair) -> None:
    folder, theirs = pair
    engine = Engine(folder, dtype="bfloat16", pool_pages=32)
    peer = type(theirs).from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours = other = 0.0
    for seed in range(4):
        prompt = prompt_of(60, seed=seed)
        with torch.inference_mode():
            truth = theirs(torch.tensor([prompt])).logits[0, -1].numpy()
            bf16 = peer(torch.tensor([prompt])).logits[0, -1].float().numpy()
        logits = last_logits(engine, prompt, [40, 19, 1], scattered_pages(engine, 60))
        ours += float(np.linalg.norm(logits - truth) / np.linalg.norm(truth))
        other += float(np.linalg.norm(bf16 - truth) / np.linalg.norm(truth))
    assert ours < 1.5 * other


def test_shards_with_an_index_load_as_one_file_does(tmp_path: Path) -> None:
    families.make("qwen3", tmp_path / "whole")
    families.make("qwen3", tmp_path / "shards", shard="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (tmp_path / "shards" / "consolidated.safetensors").write_bytes(b"not in the index")
    whole, sharded = (Engine(tmp_path / name, dtype="float32", pool_pages=8) for name in ("whole", "shards"))
    prompt = prompt_of(40)
    assert np.array_equal(last_logits(whole, prompt, [40], [0, 1, 2]), last_logits(sharded, prompt, [40], [0, 1, 2]))
    assert whole.fingerprint.difference(sharded.fingerprint) is not None


def test_an_index_that_lacks_a_file_or_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    families.make("qwen2", tmp_path, shard="100KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(EngineError, match="fetch the model again"):
        Engine(tmp_path, dtype="float32", pool_pages=8)
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../elsewhere.safetensors")
    index.write_text(json.dumps(content))
    with pytest.raises(EngineError, match="not in the folder"):
        Engine(tmp_path, dtype="float32", pool_pages=8)
    index.write_text("{}")
    with pytest.raises(EngineError, match="no weight_map"):
        Engine(tmp_path, dtype="float32", pool_pages=8)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("mistral", {"sliding_window": "absent"}, "sliding_window = 4096"),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, "sliding_window = 128"),
        ("qwen2", {"sliding_window": "absent", "use_sliding_window": True}, "sliding_window = 4096"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, None),
        ("qwen3", {"sliding_window": "absent"}, None),
    ],
)
def test_a_sliding_window_is_refused_where_it_counts(
    tmp_path: Path, name: str, changes: dict[str, object], words: str | None
) -> None:
    families.make(name, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
    if words is None:
        assert read_config(tmp_path).model_type == name
        return
    with pytest.raises(EngineError, match=words):
        read_config(tmp_path)


def test_a_missing_bias_or_head_norm_is_named(tmp_path: Path) -> None:
    families.make("qwen2", tmp_path)
    path = tmp_path / "config.json"
    qwen3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    path.write_text(json.dumps(json.loads(path.read_text()) | qwen3))
    with pytest.raises(EngineError, match=r"k_norm\.weight"):
        Engine(tmp_path, dtype="float32", pool_pages=8)
