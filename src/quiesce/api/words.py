"""The tokens of words that were met before: to cut a text into words costs a tokenizer more than to look them up.

A byte-level one always cuts before a space and a letter, and its rules look neither back nor, there, ahead. So the
pieces between such places can be tokenized one by one, and their tokens together are those of the text. That holds
for ASCII and for the rules named here; nothing is said about other texts and tokenizers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from quiesce.api.detokenize import parts_of

PIECES = re.compile(r"(?s:.)[^ ]*(?: (?![A-Za-z])[^ ]*)*")
MOST, LONGEST = 16_384, 48  # pieces that are kept, and characters of one
NEW = 16  # pieces that one text may bring: each takes 4 µs by itself, and 1.5 in a whole text
# How Llama 3, Qwen 2 and others cut; they differ in how many digits stay together.
RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def encoded(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    """By the tokenizer itself, without the offsets in the text, which cost a tenth more."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


class Words:
    """`ids` of one tokenizer's texts, with nothing around them. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: [id] for id, token in added.items()}
        self._known = dict(self._added)
        self._applies = _cuts_before_words(tokenizer) and _plain(added.values())
        longest_first = sorted(self._added, key=len, reverse=True)
        self._at_added = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def ids(self, text: str) -> list[int] | None:
        """None: this text is for the tokenizer itself."""
        if not self._applies or not text.isascii():
            return None
        pieces, known = self._pieces(text), self._known
        try:
            return list(chain.from_iterable(map(known.__getitem__, pieces)))
        except KeyError:
            new = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        made = {piece: encoded(self._tokenizer, piece) for piece in new[:NEW]}
        self._keep(made)
        if len(new) > NEW:
            return encoded(self._tokenizer, text)
        return list(chain.from_iterable(made[piece] if piece in made else known[piece] for piece in pieces))

    def _pieces(self, text: str) -> list[str]:
        """Added tokens, and what is between them."""
        found = PIECES.findall
        between = self._at_added.split(text)
        pieces = found(between[0])
        for token, after in zip(between[1::2], between[2::2], strict=True):
            pieces.append(token)
            pieces += found(after)
        return pieces

    def _keep(self, made: dict[str, list[int]]) -> None:
        if len(self._known) + len(made) > MOST:
            self._known = dict(self._added)  # begins anew: the words of the day are soon there again
        self._known.update((piece, ids) for piece, ids in made.items() if len(piece) <= LONGEST)


def _cuts_before_words(tokenizer: Tokenizer) -> bool:
    """Whether its rules are those that the above holds for."""
    parts = parts_of(tokenizer)
    cutting: dict[str, Any] = parts.pre_tokenizer or {}
    *before, last = cutting.get("pretokenizers", [cutting])
    if parts.model.type != "BPE" or parts.model.dropout or last.get("type") != "ByteLevel":
        return False
    if (parts.normalizer or {"type": "NFC"}).get("type") != "NFC" or last.get("add_prefix_space", True):
        return False
    if last.get("use_regex", True):
        return all(link.get("type") == "Digits" for link in before)
    return [_rule(link) for link in before] == [RULE]


def _plain(added: Iterable[AddedToken]) -> bool:
    """They are all looked for at once, as they are written, and take nothing of the text around them."""
    tokens = list(added)
    bare = not any(token.lstrip or token.rstrip or token.single_word for token in tokens)
    as_written = all(unicodedata.is_normalized("NFC", token.content) for token in tokens)
    return bare and as_written and len({token.normalized for token in tokens}) <= 1


def _rule(link: dict[str, Any]) -> str:
    split = msgspec.convert(link, Split) if link.get("type") == "Split" else Split()
    if split.behavior != "Isolated" or split.invert:
        return ""
    return split.pattern.get("Regex", "").replace(r"\p{N}{1,3}", r"\p{N}")


class Split(msgspec.Struct):
    pattern: dict[str, str] = {}
    behavior: str = ""
    invert: bool = False
