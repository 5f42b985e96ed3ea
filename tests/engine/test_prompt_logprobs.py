"""Log-probabilities of a prompt: those of transformers, one for each token but the first, across chunk borders."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.feeding import prompt_of
from quiesce.core.messages import Sampling, TokenLogprob
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import NonFiniteLogits
from quiesce.engine.local import LocalEngine


def of_transformers(reference: LlamaForCausalLM, prompt: list[int]) -> torch.Tensor:
    """[positions, vocab]: line i is the distribution of token i + 1."""
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), -1)


def in_chunks(engine: Engine, prompt: list[int], chunks: list[int], alternatives: int) -> list[TokenLogprob]:
    pages, start, found = list(range(20)), 0, list[TokenLogprob]()
    for size in chunks:
        row = Row(
            prompt[start : start + size],
            start,
            pages,
            history=prompt,
            prompt_tokens=len(prompt),
            prompt_logprobs=alternatives,
        )
        (result,) = engine.run([row])
        assert result.sampled is None
        found += result.prompt_logprobs
        start += size
    return found


@pytest.mark.parametrize("chunks", [[150], [1] * 20, [64, 65, 21], [16, 1, 16, 1]])
def test_prompt_logprobs_are_those_of_transformers_in_any_chunks(
    exact_engine: Engine, reference: LlamaForCausalLM, chunks: list[int]
) -> None:
    prompt = prompt_of(sum(chunks), seed=6)
    expected = of_transformers(reference, prompt)
    found = in_chunks(exact_engine, prompt, chunks, 2)
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        line = expected[position]
        assert entry.logprob == pytest.approx(float(line[prompt[position + 1]]), abs=1e-3)
        assert [token for token, _ in entry.top] == torch.topk(line, 2).indices.tolist()
    assert found == in_chunks(exact_engine, prompt, [len(prompt)], 2)


def test_a_row_beyond_the_prompt_has_none(engine: Engine) -> None:
    tokens = prompt_of(20, seed=1)
    rest = {"history": tokens, "prompt_tokens": 10, "prompt_logprobs": 0}
    (result,) = engine.run([Row(tokens, 0, [0, 1], Sampling(1), **rest)])
    assert len(result.prompt_logprobs) == 9
    assert result.sampled is not None
    (result,) = engine.run([Row(tokens[9:], 9, [0, 1], **rest)])
    assert result.prompt_logprobs == ()


def test_a_nan_in_one_row_of_two_is_told_of_that_row(engine: Engine) -> None:
    tokens = prompt_of(40, seed=1)
    rest = {"history": tokens, "prompt_tokens": 40, "prompt_logprobs": 0}
    engine.run([Row(tokens[:16], 0, [0], **rest), Row(tokens[:16], 0, [1], **rest)])
    engine.kv.tensor[0] = float("nan")
    rows = [Row(tokens[16:30], 16, [0, 2], **rest), Row(tokens[16:30], 16, [1, 3], **rest)]
    try:
        with pytest.raises(NonFiniteLogits) as error:
            engine.run(rows)
        assert error.value.rows == (0,)
        assert len(engine.run(rows[1:])[0].prompt_logprobs) == 14
    finally:
        engine.kv.tensor.zero_()


def test_the_single_process_loop_reports_prompt_and_answer(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompts = [prompt_of(n, seed=n) for n in (1, 2, 50)]
    wish = Sampling(6, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    for prompt, answer in zip(prompts, LocalEngine(engine).complete(prompts, [wish] * 3, chunk=7), strict=True):
        tokens = prompt + answer.tokens
        expected = of_transformers(reference, tokens)
        truth = [float(expected[i - 1][tokens[i]]) for i in range(1, len(tokens))]
        assert answer.prompt_logprobs[0] is None
        entries = answer.prompt_logprobs[1:] + answer.logprobs
        np.testing.assert_allclose([entry.logprob for entry in entries if entry], truth, atol=1e-3)
        assert all(entry.top[0][0] == token for entry, token in zip(answer.logprobs, answer.tokens, strict=True))
