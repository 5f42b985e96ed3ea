"""Texts tokenized word by word have the tokenizer's own tokens, or are left to it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from quiesce.api import words
from quiesce.api.words import MOST, NEW, RULE, Words

TEXT = (
    "The keeper's log: 12 storms, 1234 ships; he'd WRITTEN it (all) down.\r\n\n  It isn't lost ab  s.\tI'll see! " * 3
)
ADDED = ("<|im_start|>", "<a>", "<a>b", "<a", "ab  s")
ALPHABET = " " * 8 + "\n\r\t\v\f\x1c\x00'" + "sStTdDmMrReEvVlLab" + "0123" + ".,-()<|>/_"
PARTS = (" ", "  ", "\n", " \n", "\r\n", "\t", "a", "b", "'s", "'S", "word", "1", "1234", "12.", "(", "I'll", *ADDED)
LEVEL = pre_tokenizers.ByteLevel


def split(rule: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(rule), "isolated")
    return pre_tokenizers.Sequence([cut, LEVEL(add_prefix_space=False, use_regex=False)])


CUTS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: LEVEL(add_prefix_space=False),
    "digits": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), LEVEL(add_prefix_space=False)]),
    "qwen-2": lambda: split(RULE),
    "llama-3": lambda: split(RULE.replace(r"|\p{N}|", r"|\p{N}{1,3}|")),
}


def trained(cut: pre_tokenizers.PreTokenizer, added: AddedToken | None = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = cut
    made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=LEVEL.alphabet(), show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    made.add_tokens([AddedToken(one, normalized=False) for one in ADDED] if added is None else [added])
    return made


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", CUTS)
def test_word_by_word_is_as_the_whole_text(name: str) -> None:
    tokenizer = trained(CUTS[name]())
    found, draw = Words(tokenizer), random.Random(5)
    for _ in range(1000):
        kinds = (
            "".join(draw.choices(ALPHABET, k=draw.randrange(1, 60))),
            "".join(draw.choices(PARTS, k=draw.randrange(1, 40))),
            TEXT[draw.randrange(len(TEXT)) :][: draw.randrange(1, 200)],
        )
        for text in kinds:
            assert found.ids(text) == whole(tokenizer, text), (name, text)
    assert found.ids("") == []


def test_words_that_were_met_are_not_tokenized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(CUTS["gpt-2"]())
    found = Words(tokenizer)
    text = "<a>he wrote  down 12 ships, and he wrote\nmore<|im_start|>"
    expected = whole(tokenizer, text)
    assert found.ids(text) == expected
    monkeypatch.setattr(words, "encoded", lambda *_, **__: pytest.fail("it was tokenized again"))
    assert found.ids(text) == expected


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST", 4 * NEW)
    tokenizer = trained(CUTS["gpt-2"]())
    found = Words(tokenizer)
    for number in range(20):
        text = " ".join(f"w{number}x{each}" for each in range(3 * NEW)) + " " + "long" * 100
        assert found.ids(text) == whole(tokenizer, text)
        assert len(found._known) <= 4 * NEW < MOST
    assert not any(len(piece) > words.LONGEST for piece in found._known)


def test_other_texts_and_tokenizers_are_left_alone() -> None:
    assert Words(trained(CUTS["gpt-2"]())).ids("naïve") is None
    spaced = trained(pre_tokenizers.Metaspace())
    prefixed = trained(LEVEL(add_prefix_space=True))
    other_rule = trained(split(r"\w+|\s+"))
    greedy = trained(CUTS["gpt-2"](), AddedToken("<a>", lstrip=True))
    lower = trained(CUTS["gpt-2"]())
    lower.normalizer = normalizers.Lowercase()
    for tokenizer in (spaced, prefixed, other_rule, greedy, lower):
        assert Words(tokenizer).ids("a word") is None
