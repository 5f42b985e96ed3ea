"""One request inside an engine: its tokens, its pages, how far it has been computed, and when it is finished."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Pages
from dataclasses import dataclass, field
from typing import Literal

from quiesce.core.messages import Sampling, TransferId
from quiesce.core.proofs import LeaseKey, Proof, ProofKind
from quiesce.engine.batch import Row
from quiesce.engine.seats import can_sit
from quiesce.roles.compiling import Compiled

Outcome = Literal["stop", "length"]


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt + answer; the KV of `tokens[:computed]` is in `pages`. While it sits, `tokens` is all of it
    that changes: there is one token to compute, always."""

    tid: TransferId
    rid: str
    prompt_tokens: int
    tokens: list[int]
    sampling: Sampling
    eos: frozenset[int]
    precedence: tuple[int, float] = (0, 0.0)  # (priority, arrival): the smaller is served first, retracted last
    pages: array[int] = field(default_factory=lambda: array("i"))  # as the engine reads them: no copy for a step
    todo: int = -1  # of `tokens`, the last so many are to be computed; -1: all
    probe: bool = False  # a test of this worker: it counts nowhere
    grammar: Compiled | None = None
    scored: bool = True  # its prompt's log-probabilities, when wanted, are still to be said
    landed: Pages[int] = ()  # pages that a transfer has filled and no step has read yet
    ended: bool = False
    seat: int | None = None  # among those that run, which hold its state then: see `running.py`

    def __post_init__(self) -> None:
        # Made once: what a step or a seat lends to itself, and that it has completed.
        if self.todo < 0:
            self.todo = len(self.tokens)
        self.lease = LeaseKey.compute(self.tid)
        self.completed = Proof.spoken(ProofKind.COMPLETED, self.lease)
        self.plain = not self.probe and self.grammar is None and can_sit(self.sampling)

    @property
    def can_sit(self) -> bool:
        """Nothing but a token a step is wanted of it from now on."""
        said = not self.scored or self.sampling.prompt_logprobs is None
        return self.plain and said and not self.landed and self.todo == 1

    @property
    def stopping(self) -> list[int]:
        """The tokens that end its answer."""
        return list({*self.sampling.stop_token_ids, *(() if self.sampling.ignore_eos else self.eos)})

    @property
    def computed(self) -> int:
        return len(self.tokens) - self.todo

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefilling(self) -> bool:
        """More than the newest token is to be computed: a prompt, or an answer that was retracted."""
        return self.todo > 1

    @property
    def waits(self) -> bool:
        """Its grammar is still being compiled."""
        return self.grammar is not None and not self.grammar.ready

    def chunk(self, budget: int) -> int:
        """Tokens the next step computes for it."""
        return min(budget, self.todo)

    def row(self, count: int) -> Row:
        """The next `count` tokens; sampled when they reach the end of what is known."""
        end = self.computed + count
        sample = self.sampling if end == len(self.tokens) else None
        return Row(
            tokens=self.tokens[self.computed : end],
            start=self.computed,
            pages=self.pages,
            sample=sample,
            history=self.tokens,
            prompt_tokens=self.prompt_tokens,
            prompt_logprobs=self.sampling.prompt_logprobs if self.scored else None,
            grammar=self.grammar.progress if self.grammar else None,
            landed=self.landed,
        )

    def append(self, token: int) -> Outcome | None:
        """Takes a sampled token; the reason when the request is finished by it."""
        self.tokens.append(token)
        self.todo += 1
        if token in self.sampling.stop_token_ids or (token in self.eos and not self.sampling.ignore_eos):
            return "stop"
        return "length" if self.generated >= self.sampling.max_tokens else None


class Batch:
    """Who takes part in the next step: everyone who decodes, then prompts in order of arrival up to a budget."""

    def __init__(self, max_running: int, chunk_tokens: int) -> None:
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.members: dict[TransferId, Sequence] = {}
        self.standing: dict[TransferId, Sequence] = {}  # members without a seat
        self.under_way: list[tuple[Sequence, int]] = []  # of a step, those without a seat
        self.left: Callable[[Sequence], None] = lambda sequence: None  # hears who is no member any more

    def __len__(self) -> int:
        return len(self.members)

    @property
    def full(self) -> bool:
        return len(self.members) >= self.max_running

    def add(self, sequence: Sequence) -> None:
        assert sequence.tid not in self.members
        self.members[sequence.tid] = self.standing[sequence.tid] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It takes part in no further step. A step under way still writes its pages: that is a lease."""
        sequence.ended = True
        if self.members.pop(sequence.tid, None) is not None:
            self.standing.pop(sequence.tid, None)
            self.left(sequence)

    def plan(self) -> list[tuple[Sequence, int]]:
        """(sequence, tokens to compute) of the next step, for those without a seat."""
        decoding, prompts, budget = [], [], self.chunk_tokens
        for sequence in self.standing.values():
            if sequence.grammar is not None and sequence.waits:
                continue
            if sequence.todo <= 1:
                decoding.append((sequence, 1))
            elif budget > 0:
                count = sequence.chunk(budget)
                budget -= count
                prompts.append((sequence, count))
        return decoding + prompts
