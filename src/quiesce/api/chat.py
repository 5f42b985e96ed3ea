"""Text to token ids, by the model folder's tokenizer and chat template; in threads where the loop would wait long."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

# Before transformers is imported: a model folder is complete, nothing is looked up on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from quiesce.api.defaults import sampling_defaults
from quiesce.api.detokenize import Vocabulary, parts_of
from quiesce.api.errors import ApiError, invalid, unavailable
from quiesce.api.messages import Message, size_of
from quiesce.api.structure import unusable
from quiesce.api.toolcalls import MARKERS, Form, form_of
from quiesce.api.tools import in_words
from quiesce.api.words import Words, encoded
from quiesce.engine.grammar import GrammarError, Grammars

THREADS = 2
LARGE = 4 << 10  # bytes of a body that are read beside the loop: megabytes take seconds, and streams would wait
SHORT = 2 << 10  # bytes of text that are tokenized at once: that takes a millisecond, and a thread is no sooner there
GRAMMAR_SECONDS = 5.0
T = TypeVar("T")


class TextModel:
    """Tokenizer, chat template and vocabulary of one model folder.

    Raises ValueError or OSError, with the folder named, when the folder has no usable tokenizer.
    """

    def __init__(self, folder: Path, tool_form: Form | Literal["auto"] = "auto") -> None:
        """tool_form: how the model writes tool calls; auto: as its chat template shows."""
        try:
            self._wrapper: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises whatever its parsers raise
            raise ValueError(f"{folder} has no usable tokenizer: {error}") from error
        backend = getattr(self._wrapper, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(f"{folder} has no fast tokenizer (tokenizer.json); convert it with transformers")
        # A copy of our own: the wrapper's truncation and padding settings are not thread-safe.
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = Vocabulary(self._tokenizer)
        self._words = Words(self._tokenizer)
        self._around = self._tokenizer.num_special_tokens_to_add(False) > 0
        self.vocabulary_size = _embedding_rows(folder) or self._tokenizer.get_vocab_size()
        generation = _read(folder / "generation_config.json")
        self.eos_ids = _eos_ids(generation, _read(folder / "config.json"))
        try:
            self.sampling_defaults = sampling_defaults(generation)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        template = str(self._wrapper.chat_template or "")
        self._shows_tools = re.search(r"\btools\b", template) is not None
        self.tool_form = form_of(template) if tool_form == "auto" else tool_form
        markers = (self._tokenizer.token_to_id(marker) for marker in MARKERS)
        self.tool_markers = frozenset(id for id in markers if id is not None)
        self._longest_token = _longest_token(self._tokenizer)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="read")  # its own: nobody's tokens wait for it
        self._grammars = Grammars(folder, self.vocabulary_size, self.eos_ids)
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # its own: some take 100 ms

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapper.chat_template)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._reading.shutdown(wait=False, cancel_futures=True)
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)

    async def parsed(self, parse: Callable[[bytes], T], raw: bytes) -> T:
        """What `parse` makes of a body, or raises."""
        if len(raw) <= LARGE:
            return parse(raw)
        return await asyncio.get_running_loop().run_in_executor(self._reading, parse, raw)

    async def encode(
        self,
        prompt: str | list[int] | list[Message],
        limit: int,
        where: str = "prompt",
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text, of ids (checked against the vocabulary), or of chat messages with their tools.

        Raises ApiError 400 when there are none, when the chat template refuses, or at once when the prompt is
        so long that it cannot be within `limit` tokens. `where`: which prompt of several the error is about.
        """
        if isinstance(prompt, str):
            self._refuse_hopeless(where, len(prompt.encode()), limit)
            ids = await self.encode_text(prompt)
        elif isinstance(prompt[0], int):
            if len(prompt) >= limit:
                raise too_long(where, len(prompt), limit)
            return self.checked(prompt, where)
        else:
            messages: list[Message] = prompt
            where = "messages"
            self._refuse_hopeless(where, size_of(messages), limit)
            ids = await self.encode_chat(messages, tools=tools or [], limit=limit)
        if not ids:
            raise invalid(where, "must not be empty: it has no tokens")
        return tuple(ids)

    async def encode_text(self, text: str, special: bool = True) -> list[int]:
        """`special`: with the tokens that the tokenizer puts around a text."""
        if len(text) <= SHORT:
            return self._ids(text, special)
        return await self._in_thread(lambda: self._ids(text, special))

    def _ids(self, text: str, special: bool) -> list[int]:
        """A long text would push everybody's words out."""
        if len(text) <= SHORT and not (special and self._around):
            known = self._words.ids(text)
            if known is not None:
                return known
        return encoded(self._tokenizer, text, special)

    async def encode_chat(
        self,
        messages: list[Message],
        open_answer: bool = True,
        tools: list[dict[str, Any]] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """`open_answer`: with the words that make the model answer. Raises ApiError 400, also where what the template
        makes of them cannot be within `limit` tokens."""
        if not tools and size_of(messages) <= SHORT:
            return self._encode_chat(messages, open_answer, [], limit)
        return await self._in_thread(lambda: self._encode_chat(messages, open_answer, tools or [], limit))

    async def check_grammar(self, grammar: str, where: str) -> None:
        """Raises ApiError 400 about the field `where` for what cannot be compiled, so that no worker is asked."""
        checking = asyncio.get_running_loop().run_in_executor(self._grammar_thread, self._grammars.begin, grammar)
        try:
            await asyncio.wait_for(checking, GRAMMAR_SECONDS)
        except GrammarError as error:
            raise unusable(where, str(error)) from None
        except TimeoutError:
            text = f"{where}: could not be checked within {GRAMMAR_SECONDS:g} s, other grammars come first"
            raise unavailable(text, "grammars_busy") from None

    async def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens written out. Raises ApiError 400 for an id out of the vocabulary."""
        checked = self.checked(ids, "tokens")
        return await self._in_thread(lambda: self._tokenizer.decode(checked, skip_special_tokens=False))

    def _encode_chat(
        self, messages: list[Message], open_answer: bool, tools: list[dict[str, Any]], limit: int | None
    ) -> list[int]:
        if not self.has_chat_template:
            raise invalid("messages", "this model has no chat template; use /v1/completions", "no_chat_template")
        fields: dict[str, Any] = {"tokenize": False, "add_generation_prompt": open_answer}
        if self._shows_tools:
            fields["tools"] = tools or None
        else:
            messages = in_words(messages, tools)
        try:
            text = self._wrapper.apply_chat_template(messages, **fields)
        except (TemplateError, TypeError, ValueError) as error:
            raise invalid("messages", f"the model's chat template refused them: {error}") from None
        if limit is not None:
            self._refuse_hopeless("messages", len(text.encode()), limit)
        return self._ids(text, special=False)

    def checked(self, ids: Iterable[int], where: str) -> tuple[int, ...]:
        """The ids, when all are in the vocabulary; else ApiError 400 about the field `where`."""
        found = tuple(ids)
        for id in found:
            if not 0 <= id < self.vocabulary_size:
                raise invalid(where, f"token ids must be between 0 and {self.vocabulary_size - 1}, got {id}"[:200])
        return found

    def _refuse_hopeless(self, param: str, size: int, limit: int) -> None:
        """No token is longer than the longest, so megabytes need not be tokenized to be refused."""
        least = size // self._longest_token if self._longest_token else 0
        if least > limit:
            raise too_long(param, f"at least {least}", limit)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def too_long(param: str, tokens: int | str, limit: int) -> ApiError:
    return invalid(
        param,
        f"the prompt has {tokens} tokens, but prompt and answer together may have at most {limit} here",
        "context_length_exceeded",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):  # a folder of a tokenizer alone is fine here; the engine checks its own needs
        return {}
    return found if isinstance(found, dict) else {}


def _embedding_rows(folder: Path) -> int | None:
    """`vocab_size` of config.json: the ids that the model has an embedding for."""
    rows = _read(folder / "config.json").get("vocab_size")
    return rows if isinstance(rows, int) else None


def _eos_ids(generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end an answer, as the engine reads them."""
    found = generation.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    return tuple(id for id in (found if isinstance(found, list) else [found]) if isinstance(id, int))


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """Bytes of text that one token can stand for at most; None when that has no bound."""
    parts = parts_of(tokenizer)
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in parts.added_tokens)
    if parts.normalizer is not None or swallows:  # may drop any amount of text
        return None
    if parts.model.type != "BPE" or (parts.pre_tokenizer or {}).get("type") == "Whitespace":
        return None
    return max(map(len, map(str.encode, tokenizer.get_vocab(with_added_tokens=True))))
