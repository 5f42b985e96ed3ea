"""A whole serving loop in one process and one thread: the oracle that every other way of serving must equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError


@dataclass
class _Request:
    number: int
    prompt: list[int]
    sampling: Sampling
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # prompt tokens
    answer: list[int] = field(default_factory=list)


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
        """Answers, in the order of the prompts, a stopping token included as the last one.

        `chunk` bounds the prompt tokens of a step, `concurrency` the requests at a time. An answer ends at
        max_tokens, at a stop token, at EOS unless ignored, or at the context length. Raises EngineError for
        a prompt that can never fit.
        """
        requests = [
            _Request(number, list(prompt), wish)
            for number, (prompt, wish) in enumerate(zip(prompts, sampling, strict=True))
        ]
        for request in requests:
            self._check(request)
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
        if not request.prompt or request.sampling.max_tokens < 1:
            raise EngineError(f"prompt {request.number} is empty, or asks for no tokens")
        if len(request.prompt) >= self._engine.context_length:
            raise EngineError(f"prompt {request.number} fills the context of {self._engine.context_length}")
        if self._pages_for(request) > self._engine.kv.pages:
            raise EngineError(f"prompt {request.number} needs more pages than the pool has")

    def _pages_for(self, request: _Request) -> int:
        # the last token of an answer is never computed
        tokens = min(len(request.prompt) + request.sampling.max_tokens - 1, self._engine.context_length)
        return -(-tokens // self._engine.kv.page_size)

    def _admit(self, request: _Request) -> bool:
        needed = self._pages_for(request)
        if needed > len(self._free):
            return False
        request.pages = [self._free.pop() for _ in range(needed)]
        return True

    def _step(self, running: list[_Request], chunk: int) -> None:
        rows, askers, budget = list[Row](), list[_Request](), chunk
        for request in running:
            left = len(request.prompt) - request.computed
            if left == 0:
                start = len(request.prompt) + len(request.answer) - 1
                rows.append(Row(request.answer[-1:], start, request.pages, request.sampling))
            elif budget > 0:
                n = min(left, budget)
                new = request.prompt[request.computed : request.computed + n]
                last = request.sampling if n == left else None
                rows.append(Row(new, request.computed, request.pages, last))
                request.computed += n
                budget -= n
            else:
                continue
            askers.append(request)
        for request, token in zip(askers, self._engine.step(rows), strict=True):
            if token is not None:
                request.answer.append(token)

    def _is_over(self, request: _Request) -> bool:
        if not request.answer:
            return False
        token, wish = request.answer[-1], request.sampling
        return (
            len(request.answer) >= wish.max_tokens
            or token in wish.stop_token_ids
            or (token in self._engine.eos_ids and not wish.ignore_eos)
            or len(request.prompt) + len(request.answer) > self._engine.context_length
        )
