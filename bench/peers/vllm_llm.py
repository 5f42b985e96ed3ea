"""vLLM offline: its LLM class, driven step by step where only steps are timed."""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams

from bench.offline import Work

AT_ONCE = 2048  # tokens of a step, as its server has it; it also warms up with so many, minutes where they are slow


class Vllm:
    def __init__(self, model: str, dtype: str) -> None:
        sizes = {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": AT_ONCE}
        self._llm = LLM(model=model, dtype=dtype, disable_log_stats=True, seed=0, **sizes)
        self._engine = self._llm.llm_engine
        self._prompts: list[list[int]] = []
        self._requests = 0
        self._given: dict[str, list[int]] = {}

    def begin(self, work: Work) -> None:
        if self._given:  # a decode window leaves its requests running
            self._engine.abort_request(list(self._given))
            self._given = {}
            while self._engine.has_unfinished_requests():
                self._engine.step()
        if work.kind != "decode":
            self._prompts = []
            self._llm.reset_prefix_cache()
            return
        if work.prompts != self._prompts:  # its prefix cache keeps them from here on
            self._prompts = work.prompts
            self._generate(work.prompts, 1)
        wish = SamplingParams(temperature=0, max_tokens=work.steps + 64, ignore_eos=True, detokenize=False)
        for prompt in work.prompts:
            self._requests += 1
            name = f"decode-{self._requests}"  # what it returns is a name of its own; its outputs bear ours
            self._engine.add_request(name, {"prompt_token_ids": prompt}, wish)
            self._given[name] = []
        while not all(self._given.values()):
            if not self._engine.has_unfinished_requests():
                raise RuntimeError("vLLM has nothing to do, and not every request has its first token")
            self._step()

    def window(self, work: Work) -> list[list[int]]:
        if work.kind == "prefill":
            return self._generate(work.prompts, 1)
        if work.kind == "requests":
            return self._generate(work.prompts, work.steps)
        began = [len(tokens) for tokens in self._given.values()]
        for _ in range(work.steps):
            self._step()
        return [tokens[first:] for first, tokens in zip(began, self._given.values(), strict=True)]

    def _step(self) -> None:
        for output in self._engine.step():
            self._given[output.request_id] = list(output.outputs[0].token_ids)

    def _generate(self, prompts: list[list[int]], steps: int) -> list[list[int]]:
        wish = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in self._llm.generate(asked, wish, use_tqdm=False)]


def open_subject(model: str, dtype: str) -> Vllm:
    return Vllm(model, dtype)
