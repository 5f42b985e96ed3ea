"""A whole serving loop in one process and one thread: the oracle that every other way of serving must equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quiesce.core.messages import Sampling, TokenLogprob
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.grammar import Progress
from quiesce.engine.penalties import stopping


@dataclass
class Answer:
    """`tokens` include a stopping one. `logprobs` has one for each of them if `Sampling.logprobs` is set,
    `prompt_logprobs` one for each prompt token if that is set, None for the first."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]


@dataclass
class _Request:
    number: int
    tokens: list[int]  # prompt, then answer
    prompt_tokens: int
    sampling: Sampling
    answer: Answer
    grammar: Progress | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0

    def row(self, count: int) -> Row:
        end = self.computed + count
        prefilling = self.computed < self.prompt_tokens
        return Row(
            tokens=self.tokens[self.computed : end],
            start=self.computed,
            pages=self.pages,
            sample=self.sampling if end == len(self.tokens) else None,
            history=self.tokens,
            prompt_tokens=self.prompt_tokens,
            prompt_logprobs=self.sampling.prompt_logprobs if prefilling else None,
            grammar=self.grammar,
        )


class LocalEngine:
    """Continuous batching with chunked prefill over one Engine whose pages it has for itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free = list(range(engine.kv.pages))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        chunk: int = 512,
        concurrency: int = 32,
    ) -> list[list[int]]:
        """The tokens of `complete`'s answers."""
        return [answer.tokens for answer in self.complete(prompts, sampling, chunk=chunk, concurrency=concurrency)]

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        chunk: int = 512,
        concurrency: int = 32,
    ) -> list[Answer]:
        """Answers, in the order of the prompts.

        `chunk` bounds the prompt tokens of a step, `concurrency` the requests at a time. An answer ends at
        max_tokens, at a stop token, at EOS unless ignored, or at the context length. Raises EngineError for
        a prompt that can never fit.
        """
        requests = [
            _Request(number, list(prompt), len(prompt), wish, Answer([], [], []))
            for number, (prompt, wish) in enumerate(zip(prompts, sampling, strict=True))
        ]
        for request in requests:
            self._check(request)
            if request.sampling.grammar:
                request.grammar = self._engine.grammars.begin(request.sampling.grammar)
        waiting, running = deque(requests), list[_Request]()
        while waiting or running:
            while waiting and len(running) < concurrency and self._admit(waiting[0]):
                running.append(waiting.popleft())
            self._step(running, chunk)
            for request in [r for r in running if self._is_over(r)]:
                running.remove(request)
                self._free += request.pages
        return [request.answer for request in requests]

    def _check(self, request: _Request) -> None:
        if not request.tokens or request.sampling.max_tokens < 1:
            raise EngineError(f"prompt {request.number} is empty, or asks for no tokens")
        if request.prompt_tokens >= self._engine.context_length:
            raise EngineError(f"prompt {request.number} fills the context of {self._engine.context_length}")
        if self._pages_for(request) > self._engine.kv.pages:
            raise EngineError(f"prompt {request.number} needs more pages than the pool has")

    def _pages_for(self, request: _Request) -> int:
        # the last token of an answer is never computed
        tokens = min(request.prompt_tokens + request.sampling.max_tokens - 1, self._engine.context_length)
        return -(-tokens // self._engine.kv.page_size)

    def _admit(self, request: _Request) -> bool:
        needed = self._pages_for(request)
        if needed > len(self._free):
            return False
        request.pages = [self._free.pop() for _ in range(needed)]
        if request.sampling.prompt_logprobs is not None:
            request.answer.prompt_logprobs.append(None)
        return True

    def _step(self, running: list[_Request], chunk: int) -> None:
        plan, budget = list[tuple[_Request, int]](), chunk
        for request in running:
            count = len(request.tokens) - request.computed
            if request.computed < request.prompt_tokens:
                count = min(count, budget)
                budget -= count
            if count:
                plan.append((request, count))
        results = self._engine.run([request.row(count) for request, count in plan])
        for (request, count), result in zip(plan, results, strict=True):
            request.computed += count
            request.answer.prompt_logprobs += result.prompt_logprobs
            if result.sampled is not None:
                request.tokens.append(result.sampled.token)
                request.answer.tokens.append(result.sampled.token)
                if result.sampled.logprob is not None:
                    request.answer.logprobs.append(result.sampled.logprob)

    def _is_over(self, request: _Request) -> bool:
        answer, wish = request.answer.tokens, request.sampling
        return bool(answer) and (
            len(answer) >= wish.max_tokens
            or answer[-1] in stopping(wish, self._engine.eos_ids)
            or len(request.tokens) > self._engine.context_length
        )
