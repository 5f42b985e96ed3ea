"""Grammars in the engine: what may follow, said again and again, and what an answer without one pays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.grammar import KEPT, MAX_GRAMMAR, GrammarError, Grammars, TooComplexError
from quiesce.engine.local import LocalEngine
from quiesce.engine.penalties import penalised
from quiesce.engine.sampler import check_sampling
from tiny_model import make_tiny_llama

# The byte alphabet begins at "!", behind four specials; no token of two letters has these.
A, B, C = (4 + ord(letter) - ord("!") for letter in "QVX")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, dtype="float32", pool_pages=64)


def regex(text: str) -> str:
    return LLMatcher.grammar_from_regex(text)


def ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


def test_what_may_follow_depends_on_the_tokens_alone(engine: Engine) -> None:
    eos = sorted(engine.eos_ids)
    progress = engine.grammars.begin(regex("QV?X"))
    prompt = [A, B, C]
    assert ids(progress.allowed(prompt, 3)) == [A]
    assert ids(progress.allowed(prompt, 3)) == [A], "a step that is repeated reads nothing twice"
    assert ids(progress.allowed([*prompt, A], 3)) == [B, C]
    assert ids(progress.allowed([*prompt, A, B, C], 3)) == eos
    assert ids(progress.allowed([*prompt, A], 3)) == [B, C], "fewer tokens than before: read anew"
    other = engine.grammars.begin(regex("QV?X"))
    assert ids(other.allowed([*prompt, A, C], 3)) == eos, "from the middle, as after a hand-off"
    with pytest.raises(GrammarError, match="left its grammar"):
        engine.grammars.begin(regex("QV?X")).allowed([*prompt, B], 3)


def test_answers_are_of_their_grammar_whatever_else_is_wished(engine: Engine) -> None:
    grammar = regex("[QV]{5}X")
    wishes = [
        Sampling(max_tokens=20, grammar=grammar),
        Sampling(max_tokens=20, grammar=grammar, temperature=1.0, top_p=0.5, top_k=3, seed=5),
        Sampling(max_tokens=20, grammar=grammar, temperature=2.0, min_p=0.9, repetition_penalty=5.0),
        Sampling(max_tokens=20, grammar=grammar, logit_bias=((A, -100.0), (B, -100.0), (C, 100.0))),
        Sampling(max_tokens=20, grammar=grammar, min_tokens=15, logprobs=2),
    ]
    answers = LocalEngine(engine).complete([[A, B, C]] * len(wishes), wishes)
    for answer in answers:
        assert len(answer.tokens) == 7 and set(answer.tokens[:5]) <= {A, B}
        assert answer.tokens[5] == C and answer.tokens[6] in engine.eos_ids
    assert len(answers[-1].logprobs) == 7


def test_a_row_without_grammar_draws_what_it_drew_and_copies_nothing(engine: Engine) -> None:
    logits = np.arange(8, dtype=np.float32)
    assert penalised(logits, Sampling(max_tokens=1), (), 0, ()) is logits
    plain = Sampling(max_tokens=12, temperature=1.0, seed=3)
    alone = LocalEngine(engine).generate([[A, B]], [plain])
    held = Sampling(max_tokens=12, grammar=regex("Q{11}"))
    assert LocalEngine(engine).generate([[A, B], [C]], [plain, held])[0] == alone[0]


def test_one_bad_row_is_refused_and_named(engine: Engine) -> None:
    wish = Sampling(max_tokens=1, grammar=regex("Q"))
    with pytest.raises(EngineError, match="was not compiled"):
        engine.run([Row([A], 0, [0], wish, history=[A], prompt_tokens=1)])
    with pytest.raises(EngineError, match="ignore_eos"):
        check_sampling(Sampling(max_tokens=1, grammar="x", ignore_eos=True), 512, {2})


def test_what_cannot_be_compiled_says_why(engine: Engine, folder: Path, tmp_path: Path) -> None:
    for grammar, why in [
        (regex("(?=a)b"), "look-ahead"),
        (LLMatcher.grammar_from_json_schema({"type": "object", "minProperties": -1}), "minProperties"),
        (LLMatcher.grammar_from_json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable"),
        ("x" * (MAX_GRAMMAR + 1), f"at most {MAX_GRAMMAR}"),
        ("", "."),
    ]:
        with pytest.raises(GrammarError, match=why):
            engine.grammars.begin(grammar)
    with pytest.raises(GrammarError, match="no token that ends an answer"):
        Grammars(folder, 512, ()).begin(regex("Q"))
    with pytest.raises(GrammarError, match="tokenizer"):
        Grammars(tmp_path, 512, (2,)).begin(regex("Q"))


def test_what_meets_a_limit_says_so_at_once_or_in_the_middle(engine: Engine) -> None:
    for text in ("a{1000000}", "(((((((((a){10}){10}){10}){10}){10}){10}){10}){10}){10}"):
        with pytest.raises(TooComplexError, match="too complex"):
            engine.grammars.begin(regex(text))
    endless = engine.grammars.begin(LLMatcher.grammar_from_lark("start: /Q/ start"))
    answer: list[int] = []
    with pytest.raises(TooComplexError, match="too complex"):
        while len(answer) < 100:
            answer.append(ids(endless.allowed(answer, 0))[-1])


DEEP = """
import json, sys
from pathlib import Path
from quiesce.api.structure import of_ebnf, of_schema
from quiesce.engine.grammar import GrammarError, Grammars

def chain(count, link):
    schemas = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/0", "$defs": schemas | {str(count): {"type": "null"}}}

def nested(inner):
    for _ in range(40):
        inner = {"allOf": [inner]}
    return inner

rules = [f"a{i:x}a: a{i + 1:x}a" for i in range(14_000)]
terminals = [f"T{i}: T{i + 1}" for i in range(9_000)]
hostile = [
    of_schema(chain(7_000, lambda next: next), "references"),
    of_schema(chain(400, nested), "nested"),
    of_ebnf("\\n".join(["start: a0a", *rules, f'a{14_000:x}a: "a"']), "rules"),
    of_ebnf("\\n".join(["start: T0", *terminals, 'T9000: "a"']), "terminals"),
]
grammars = Grammars(Path(sys.argv[1]), 512, (1,))
for grammar in hostile:
    try:
        grammars.begin(grammar).allowed([5], 1)
    except GrammarError as error:
        print("refused:", error)
print("alive")
"""


@pytest.mark.slow
def test_a_deep_grammar_ends_no_process(folder: Path) -> None:
    """In a process of its own, as it would take this one with it."""
    words = [sys.executable, "-c", DEEP, str(folder)]
    run = subprocess.run(words, check=False, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0 and run.stdout.endswith("alive\n"), (run.returncode, run.stdout, run.stderr[-2000:])


@pytest.mark.parametrize("words", ["<|endoftext|>", "<|im_end|>", "Q<|im_end|>V", "<|pad|><|im_start|>"])
def test_words_that_look_like_a_special_token_are_text_where_a_grammar_forces_them(
    engine: Engine, folder: Path, words: str
) -> None:
    decoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    progress = engine.grammars.begin(LLMatcher.grammar_from_lark(f"start: {json.dumps(words)}"))
    answer: list[int] = []
    while (allowed := ids(progress.allowed([9, *answer], 1))) != sorted(engine.eos_ids):
        answer.append(allowed[0])
    assert decoder.decode(answer, skip_special_tokens=True) == words


def test_a_special_token_that_a_grammar_names_is_that_token(engine: Engine) -> None:
    progress = engine.grammars.begin(LLMatcher.grammar_from_lark('start: <|pad|> "Q"'))
    assert ids(progress.allowed([9], 1)) == [2] and ids(progress.allowed([9, 2], 1)) == [A]


def test_an_answer_that_meets_a_limit_in_the_middle_is_its_clients_fault(engine: Engine) -> None:
    """However the library says so: no breaker may hear of it."""
    progress = engine.grammars.begin(LLMatcher.grammar_from_lark('start: ("Q"~1..100)~1..100'))
    with pytest.raises(TooComplexError):
        for length in range(1, 300):
            progress.allowed([9, *[A] * length], 1)


def test_compiled_grammars_are_kept_within_a_bound(folder: Path) -> None:
    grammars = Grammars(folder, 512, (2,))
    first = grammars.begin(regex("Q{1}"))
    for n in range(KEPT + 5):
        grammars.begin(regex(f"Q{{{n + 1}}}"))
    assert len(grammars._compiled) == KEPT
    assert ids(first.allowed([], 0)) == [A], "one that is in use does not need the cache"
