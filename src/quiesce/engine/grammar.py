"""What an answer must look like: a grammar, compiled once, and how far each answer has come in it. No torch here.

An answer's place in its grammar is a function of its tokens alone. So nothing of it is handed over or saved:
whoever goes on with an answer (decode after prefill, an engine after a retraction) reads its tokens, each once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quiesce.engine.errors import EngineError

MAX_GRAMMAR = 256 << 10  # bytes of one grammar as it travels; the library bounds its own work by fuel
KEPT = 32  # compiled grammars
# The library's own limits are wider. With these no step of the engine waits for a mask much longer than 30 ms, and a
# compiled grammar has at most some 10 MB; errors do not quote the answer.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # under a second to compile, as one that compiles keeps the others waiting
    step_max_items=8_000,
    step_lexer_fuel=50_000,
    max_lexer_states=10_000,
    verbose_errors=False,
)
AT_A_LIMIT = ("too many", "too big", "fuel", "limit", "max is")  # how the library says that one of them was met
# The library descends into rules and references by recursion, some KB each, and 256 KiB hold 30,000 of them: on a
# usual stack they end the process. A stack costs what is used of it.
STACK = 512 << 20


class GrammarError(EngineError):
    """A grammar that cannot be used, or an answer that has left it. The text names what is wrong."""


class TooComplexError(GrammarError):
    """The grammar meets one of the limits, at once or in the middle of an answer: its client is to blame."""


class Spelling:
    """How text that a grammar forces is written in tokens. The library takes the words of a special token, which may
    stand in a schema as in any text, for that token, and then refuses it; here they are spelled like other words."""

    def __init__(self, tokenizer: LLTokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._by_bytes: dict[bytes, list[int]] = {}  # made when it is first needed

    def of_text(self, matcher: LLMatcher, found: np.ndarray) -> np.ndarray:
        """`found`: what may follow, as the library says it."""
        if np.count_nonzero(found) != 1 or not self._tokenizer.is_special_token(int(found.argmax())):
            return found
        text = matcher.compute_ff_bytes()
        if not text or text.startswith(b"\xff"):  # the end of the answer, or a special token that a grammar names
            return found
        if not self._by_bytes:
            for id in range(self._vocabulary):
                if not self._tokenizer.is_special_token(id):
                    self._by_bytes.setdefault(self._tokenizer.decode_bytes([id]), []).append(id)
        spelled = np.zeros_like(found)
        for length in range(1, 1 + min(len(text), max(map(len, self._by_bytes)))):
            spelled[self._by_bytes.get(text[:length], [])] = True
        return spelled


class Progress:
    """One answer's way through its grammar. One thread at a time."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, spelling: Spelling) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._spelling = spelling
        self._taken = 0

    def allowed(self, history: Sequence[int], prompt_tokens: int) -> np.ndarray:
        """bool [vocabulary]: what may follow `history`, of which the tokens behind `prompt_tokens` are the answer.

        At the end of the grammar these are the tokens that end an answer. Asked again about the same tokens it
        says the same. Raises GrammarError when the answer is not of the grammar, TooComplexError at a limit.
        """
        answered = len(history) - prompt_tokens
        if answered < self._taken:
            self._matcher.reset()
            self._taken = 0
        fresh = list(history[prompt_tokens + self._taken :])
        if fresh and not self._matcher.consume_tokens(fresh):
            raise _fault(self._matcher, "the answer has left its grammar")
        self._taken = answered
        bits = _mask(self._matcher)
        found = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
        return self._spelling.of_text(self._matcher, found)


class Grammars:
    """The grammars of one tokenizer. Any thread may call; one at a time compiles."""

    def __init__(self, tokenizer: Path | str, vocabulary: int, eos_ids: Collection[int]) -> None:
        """tokenizer: a folder with a tokenizer.json, or the text of one; it is read when it is first needed."""
        self._source = tokenizer
        self._vocabulary = vocabulary
        self._eos = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._spelling: Spelling | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, grammar: str) -> Progress:
        """An answer that has no token yet. Compiles what is new, without the interpreter's lock: 1 ms as a rule,
        some 100 ms for the largest. Raises GrammarError."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = _on_a_deep_stack(lambda: self._compile(grammar))
                self._compiled[grammar] = matcher
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            assert self._spelling is not None
            return Progress(matcher.deep_copy(), self._vocabulary, self._spelling)

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar.encode()) > MAX_GRAMMAR:
            raise GrammarError(f"the grammar has {len(grammar.encode())} bytes, at most {MAX_GRAMMAR} are taken")
        if self._tokenizer is None:
            self._tokenizer = self._load()
            self._spelling = Spelling(self._tokenizer, self._vocabulary)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        mask = _mask(matcher.deep_copy())
        if not mask.any():
            raise GrammarError("no token of this model can begin an answer of this grammar")
        _mask(matcher.deep_copy())  # some meet a limit at the second time only: copies share what they have built
        return matcher

    def _load(self) -> LLTokenizer:
        if not self._eos:
            raise GrammarError("the model has no token that ends an answer, so no grammar can end one")
        source = self._source if isinstance(self._source, str) else str(self._source / "tokenizer.json")
        try:
            return LLTokenizer(source, n_vocab=self._vocabulary, eos_token=self._eos)
        except Exception as error:  # the library raises whatever its parsers raise
            raise GrammarError(f"the model's tokenizer cannot be used for grammars: {_short(str(error))}") from error


def _on_a_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """What it returns or raises. One caller at a time: the size of stacks is the interpreter's."""
    made: list[LLMatcher] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(work())
        except Exception as error:
            failed.append(error)

    before = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=run, name="grammar stack")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _mask(matcher: LLMatcher) -> np.ndarray:
    """uint8, a bit for each token."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error():
        raise TooComplexError(f"the grammar is too complex: {_short(matcher.get_error())}")
    return mask


def _fault(matcher: LLMatcher, otherwise: str) -> GrammarError:
    said = _short(matcher.get_error())
    if any(word in said.lower() for word in AT_A_LIMIT):
        return TooComplexError(f"the grammar is too complex: {said}")
    return GrammarError(f"{otherwise}: {said}")


def _short(text: str) -> str:
    """One line of the library's error, without the pages that it may draw."""
    return " ".join(text.split())[:400]
