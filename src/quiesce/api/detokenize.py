"""Token ids to text, a few at a time: the joined pieces equal one decode of all ids, and stop strings cut them.

Two ways, by what the tokenizer's decoder does. Byte-level: every token is some bytes, and a UTF-8 decoder that
keeps its state over calls never starts inside a character. Anything else: decode again from the last token
that no later one can change; runs of byte-fallback tokens are held until they end, because one bad byte turns
the whole run into U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Model(msgspec.Struct):
    type: str = ""
    dropout: float | None = None


class Parts(msgspec.Struct):
    """What is asked of how a tokenizer is made; its vocabulary, which is most of that, is passed over."""

    model: Model
    added_tokens: list[dict[str, Any]] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def parts_of(tokenizer: Tokenizer) -> Parts:
    return msgspec.json.decode(tokenizer.to_str(), type=Parts)


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Vocabulary:
    """What the incremental decoders need to know of a tokenizer; shared by all requests, read-only but a cache."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)
        decoder = parts_of(tokenizer).decoder or {}
        chain = decoder.get("decoders", [decoder])
        self.byte_level = [link.get("type") for link in chain] == ["ByteLevel"]
        self._spaced = any(_writes_spaces(link) for link in chain)
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a byte-level token stands for; empty for ids outside the vocabulary."""
        known = self._bytes.get(id)
        if known is None:
            token = self.tokenizer.id_to_token(id) or ""
            codes = [self._alphabet.get(character) for character in token]
            # An added token is written as itself, not in the byte alphabet.
            known = token.encode() if None in codes else bytes(code for code in codes if code is not None)
            self._bytes[id] = known
        return known

    def shown(self, id: int) -> tuple[str, bytes]:
        """A token by itself, for people: its text and its bytes. Bytes that are no text are written `\\xe2\\x80`."""
        if self.byte_level:
            raw = self.token_bytes(id)
        else:
            token = self.tokenizer.id_to_token(id) or ""
            byte = BYTE_TOKEN.fullmatch(token)
            raw = bytes([int(token[3:5], 16)]) if byte else token.replace("▁", " " if self._spaced else "▁").encode()
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in raw), raw

    def is_byte(self, id: int) -> bool:
        return BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(id) or "") is not None

    def detokenizer(self, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """`shown`: special tokens that are text here, written out."""
        silent = self.special - shown
        return ByteLevelDetokenizer(self, silent) if self.byte_level else WindowDetokenizer(self, silent, shown)


def _writes_spaces(link: dict[str, Any]) -> bool:
    """A decoder that turns SentencePiece's mark into a space."""
    return link.get("type") == "Metaspace" or (link.get("pattern") or {}) == {"String": "▁"}


class Detokenizer:
    """`push` returns the text that is certain after one more token; `flush` the rest. Special tokens are silent."""

    def push(self, id: int) -> str:
        raise NotImplementedError

    def flush(self) -> str:
        raise NotImplementedError


class ByteLevelDetokenizer(Detokenizer):
    def __init__(self, vocabulary: Vocabulary, silent: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._special = silent
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        if id in self._special:
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    def __init__(self, vocabulary: Vocabulary, silent: frozenset[int], shown: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._special, self._shown = silent, shown
        self._context: list[int] = []  # what the held tokens are decoded behind: their text may depend on it
        self._context_text = ""
        self._held: list[int] = []

    def push(self, id: int) -> str:
        if id in self._special:
            return ""
        if id in self._shown:
            return self.flush() + (self._vocabulary.tokenizer.id_to_token(id) or "")
        self._held.append(id)
        return "" if self._vocabulary.is_byte(id) else self.flush()

    def flush(self) -> str:
        if not self._held:
            return ""
        decode = self._vocabulary.tokenizer.decode
        text = decode([*self._context, *self._held])[len(self._context_text) :]
        self._move_context()
        return text

    def _move_context(self) -> None:
        last = self._held[-1]
        last_text = self._vocabulary.tokenizer.decode([last])
        if last_text and not self._vocabulary.is_byte(last):
            self._context, self._context_text = [last], last_text
        else:
            self._context = [*self._context, *self._held]
            self._context_text = self._vocabulary.tokenizer.decode(self._context)
        self._held = []


class StopMatcher:
    """Finds the stop string that ends first in a text that comes in pieces; what may become one is held back.

    One automaton per stop string (Knuth, Morris, Pratt), so the result does not depend on how the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.found = False

    def push(self, text: str, armed: bool = True) -> str:
        """The part of the text so far that is certain and not yet returned. Nothing after `found`.

        Not `armed`: a stop string that is complete within `text` does not count.
        """
        if not self._stops or not text:
            return text
        held = self._held + text
        for at, character in enumerate(text, start=len(self._held) + 1):
            longest = 0
            for i, (stop, borders) in enumerate(self._stops):
                length = self._matched[i]
                while length and stop[length] != character:
                    length = borders[length - 1]
                length += stop[length] == character
                self._matched[i] = length
                if length == len(stop):
                    self._matched[i] = borders[-1]
                    if armed:
                        longest = max(longest, length)
            if longest:
                self.found = True
                self._held = ""
                return held[: at - longest]
        keep = len(held) - max(self._matched)
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """For each prefix: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders


class TextStream:
    """One answer's text. `counted` tokens belong to it: those up to and with the one that completed a stop string.

    `offsets` has, for each counted token, the characters of text that were there before it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str] = (),
        silent: Iterable[int] = (),
        min_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """silent: token ids that end the answer and have no text (stop_token_ids, end of sequence).

        min_tokens: a stop string counts only when a later token completes it. shown: special tokens written out.
        """
        self._detokenizer = vocabulary.detokenizer(shown)
        self._matcher = StopMatcher(stops)
        self._silent = frozenset(silent)
        self._min_tokens = min_tokens
        self._characters = 0
        self.offsets: list[int] = []

    @property
    def counted(self) -> int:
        return len(self.offsets)

    @property
    def stopped(self) -> bool:
        return self._matcher.found

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens make certain; tokens after a stop string are ignored and not counted."""
        pieces = []
        for id in ids:
            if self.stopped:
                break
            self.offsets.append(self._characters)
            if id not in self._silent:
                text = self._detokenizer.push(id)
                self._characters += len(text)
                pieces.append(self._matcher.push(text, self.counted > self._min_tokens))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest at the end of the answer; half a character becomes U+FFFD, as in a decode of all ids."""
        if self.stopped:
            return ""
        text = self._matcher.push(self._detokenizer.flush(), self.counted > self._min_tokens)
        return text if self.stopped else text + self._matcher.flush()
