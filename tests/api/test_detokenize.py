"""Incremental detokenisation on real tokenizers, byte-level and byte-fallback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quiesce.api.detokenize import StopMatcher, TextStream, Vocabulary
from tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("detokenize"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("naïve added", special=False), AddedToken("\ufffd", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: pieces with a mark for the space, bytes for what has no piece."""
    pieces = ["▁", "a", "b", "▁a", "ab", "é", "漢", "▁▁", "\ufffd"]
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    model = models.BPE(
        vocab={entry: i for i, entry in enumerate(entries)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def metaspace() -> Tokenizer:
    entries = ["<unk>", "▁", "a", "b", "▁a", "ab", "▁the", "漢"]
    tokenizer = Tokenizer(models.BPE(vocab={e: i for i, e in enumerate(entries)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


TOKENIZERS = {"byte_fallback": byte_fallback(), "metaspace": metaspace()}


def pieces_of(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """The deltas when the ids come in groups of these sizes, over and over."""
    stream = TextStream(Vocabulary(tokenizer))
    deltas = []
    at = turn = 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(stream.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    assert stream.counted == len(ids)
    return [*deltas, stream.flush()]


def tokenizer_named(name: str, byte_level: Tokenizer) -> Tokenizer:
    return TOKENIZERS.get(name, byte_level)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace"])
def test_scenario_f86_joined_deltas_are_the_decode_of_all_ids(name: str, byte_level: Tokenizer) -> None:
    tokenizer = tokenizer_named(name, byte_level)
    ids = st.integers(0, tokenizer.get_vocab_size() - 1)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(ids, max_size=40), st.lists(st.integers(1, 8), min_size=1, max_size=4))
    def check(tokens: list[int], sizes: list[int]) -> None:
        assert "".join(pieces_of(tokenizer, tokens, sizes)) == tokenizer.decode(tokens)

    check()


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["한국어", "👩‍👩‍👧‍👦", "é", "e\u0301", "🇨🇿", "漢字", "the", " ", "\x00"]), max_size=12
    ),
    size=st.integers(1, 8),
    cut=st.integers(0, 6),
)
def test_scenario_f86_no_broken_character_unless_the_answer_ends_in_one(
    byte_level: Tokenizer, words: list[str], size: int, cut: int
) -> None:
    ids = byte_level.encode("".join(words), add_special_tokens=False).ids
    ids = ids[: max(0, len(ids) - cut)]  # ends by length, maybe inside a character
    deltas = pieces_of(byte_level, ids, [size])
    assert "".join(deltas) == byte_level.decode(ids)
    assert all("\ufffd" not in delta for delta in deltas[:-1])


def test_scenario_f86_a_first_token_of_half_a_character_is_an_empty_delta(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("é", add_special_tokens=False).ids
    assert len(ids) == 2
    assert pieces_of(byte_level, ids, [1]) == ["", "é", ""]


def test_byte_fallback_runs_are_whole_or_replaced_as_in_a_full_decode() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    e, bad = [tokenizer.token_to_id(t) for t in ("<0xC3>", "<0xA9>")], tokenizer.token_to_id("<0xFF>")
    a = tokenizer.token_to_id("▁a")
    assert "".join(pieces_of(tokenizer, [a, *e, a], [1])) == "aé a"
    assert "".join(pieces_of(tokenizer, [a, *e, bad, a], [1])) == "a\ufffd\ufffd\ufffd a"


def test_special_tokens_and_stop_tokens_have_no_text(byte_level: Tokenizer) -> None:
    letter = byte_level.encode("a").ids[0]
    stream = TextStream(Vocabulary(byte_level), silent=[letter])
    assert stream.push([byte_level.token_to_id("<|im_end|>"), letter]) == ""
    assert stream.counted == 2


def test_a_long_run_of_broken_bytes_costs_linear_time() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    decoded = 0

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids)

    vocabulary = Vocabulary(tokenizer)
    vocabulary.tokenizer = Counting()  # type: ignore[assignment]
    stream = TextStream(vocabulary)
    bad = tokenizer.token_to_id("<0xFF>")
    for _ in range(5000):
        stream.push([bad])
    assert stream.flush() == "\ufffd" * 5000
    assert decoded < 5 * 5000


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@example(text="xaaab", stops=["aab"], sizes=[1])  # a mismatch that leaves a shorter match
@given(text=st.text("abc", max_size=30), stops=STOPS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_stop_strings_cut_at_the_one_that_ends_first_however_the_text_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stops)
    got, at, turn = "", 0, 0
    while at < len(text) and not matcher.found:
        size = sizes[turn % len(sizes)]
        got += matcher.push(text[at : at + size])
        at, turn = at + size, turn + 1
        if not matcher.found:
            # Nothing certain is kept back: what is held is the start of a stop string.
            held = text[: min(at, len(text))][len(got) :]
            assert text.startswith(got)
            assert not held or any(stop.startswith(held) for stop in stops)
    ends = [
        (end, start)
        for stop in stops
        for end, start in [(m.start() + len(stop), m.start()) for m in re.finditer(f"(?={stop})", text)]
    ]
    if ends:
        first_end = min(end for end, _ in ends)
        assert matcher.found
        assert got == text[: min(start for end, start in ends if end == first_end)]
    else:
        assert not matcher.found
        assert got + matcher.flush() == text


def test_tokens_after_the_stop_string_are_neither_text_nor_counted(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello STOP more").ids
    for size in (1, 2, len(ids)):
        stream = TextStream(Vocabulary(byte_level), ["STOP"])
        said = "".join(stream.push(ids[i : i + size]) for i in range(0, len(ids), size)) + stream.flush()
        assert said == "hello " and stream.stopped
        assert "STOP" in byte_level.decode(ids[: stream.counted])
        assert "STOP" not in byte_level.decode(ids[: stream.counted - 1])


def test_a_half_matched_stop_string_is_given_back_at_the_end(byte_level: Tokenizer) -> None:
    stream = TextStream(Vocabulary(byte_level), ["</answer>"])
    assert stream.push(byte_level.encode("x </ans").ids) == "x "
    assert stream.flush() == "</ans" and not stream.stopped


@settings(max_examples=300, deadline=None)
@given(letters=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=3), least=st.integers(0, 8))
def test_a_stop_string_that_min_tokens_complete_does_not_count(
    byte_level: Tokenizer, letters: str, stop: str, least: int
) -> None:
    ids = [byte_level.token_to_id(letter) for letter in letters]
    stream = TextStream(Vocabulary(byte_level), [stop], min_tokens=least)
    said = "".join(stream.push([id]) for id in ids) + stream.flush()
    ends = [end for end in range(least + 1, len(letters) + 1) if letters[:end].endswith(stop)]
    assert said == (letters[: ends[0] - len(stop)] if ends else letters)
    assert stream.counted == (ends[0] if ends else len(ids))


def test_tokens_are_shown_as_text_and_as_bytes(byte_level: Tokenizer) -> None:
    shown = Vocabulary(byte_level).shown
    first, second = byte_level.encode("é").ids
    assert shown(byte_level.token_to_id("th")) == ("th", b"th")
    assert (shown(first), shown(second)) == (("\\xc3", b"\xc3"), ("\\xa9", b"\xa9"))
    assert shown(byte_level.token_to_id("<|im_end|>")) == ("<|im_end|>", b"<|im_end|>")
    assert shown(10**6) == ("", b"")
    fallback = TOKENIZERS["byte_fallback"]
    shown = Vocabulary(fallback).shown
    assert shown(fallback.token_to_id("▁a")) == (" a", b" a")
    assert shown(fallback.token_to_id("<0xC3>")) == ("\\xc3", b"\xc3")
    assert shown(fallback.token_to_id("<0x41>")) == ("A", b"A")
    spaced = TOKENIZERS["metaspace"]
    assert Vocabulary(spaced).shown(spaced.token_to_id("▁the")) == (" the", b" the")


def test_offsets_count_whole_characters(byte_level: Tokenizer) -> None:
    stream = TextStream(Vocabulary(byte_level))
    stream.push(byte_level.encode("aéa").ids)
    assert stream.offsets == [0, 1, 1, 2]
