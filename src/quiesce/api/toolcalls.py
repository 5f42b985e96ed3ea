"""Reads tool calls out of an answer's text as it comes, in the forms that models write them."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from quiesce.api.tools import Tools

Form = Literal["hermes", "llama3_json", "mistral"]
FORMS: tuple[Form, ...] = ("hermes", "llama3_json", "mistral")
ALPHABET = string.ascii_letters + string.digits
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
MARKERS = (PYTHON_TAG, TOOL_CALLS, "[ARGS]", "<tool_call>", "</tool_call>")  # shown although some are special tokens


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Call:
    """A call has begun; its arguments follow as JSON text, in pieces."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    index: int
    text: str


Piece = Text | Call | Arguments


class Reader:
    """`push` the text as it comes, `finish` at its end. What only looks like a call is text, and nothing is lost."""

    def __init__(self, names: Iterable[str] = (), id_length: int = 24) -> None:
        self._names = frozenset(names)
        self._id_length = id_length
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []

    def _call(self, name: str, arguments: str) -> list[Piece]:
        index, self.calls = self.calls, self.calls + 1
        prefix = "call_" if self._id_length > 9 else ""
        id = prefix + "".join(secrets.choice(ALPHABET) for _ in range(self._id_length))
        begun = Call(index, id, name)
        return [begun, Arguments(index, arguments)] if arguments else [begun]

    def _calls_in(self, raw: str) -> list[Piece] | None:
        """The calls of a JSON object, or a list of them; None when it is not that, or a tool was not offered."""
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        calls = found if isinstance(found, list) else [found]
        read = [_name_and_arguments(call) for call in calls]
        if not read or any(one is None or one[0] not in self._names for one in read):
            return None
        return [piece for one in read if one is not None for piece in self._call(*one)]


def _name_and_arguments(call: Any) -> tuple[str, str] | None:
    if not isinstance(call, dict):
        return None
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


class HermesReader(Reader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, text around them (Hermes, Qwen)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Iterable[str] = (), id_length: int = 24) -> None:
        super().__init__(names, id_length)
        self._held = ""
        self._inside = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        said: list[Piece] = []
        while True:
            before, mark, after = self._held.partition(self.CLOSE if self._inside else self.OPEN)
            if not mark:
                break
            self._held = after
            if self._inside:
                calls = self._calls_in(before)
                said += [Text(self.OPEN + before + self.CLOSE)] if calls is None else calls
            elif before.strip() or (before and not self.calls):
                said.append(Text(before))
            self._inside = not self._inside
        if not self._inside:
            keep = _begun(self._held, self.OPEN)
            loose, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            if self.calls and not loose.strip():  # line breaks between calls
                self._held = loose + self._held
            elif loose:
                said.append(Text(loose))
        return said

    def finish(self) -> list[Piece]:
        """A call that was not closed counts when it is whole: some models end their answer with it."""
        held, self._held = self._held, ""
        if self._inside:
            calls = self._calls_in(held)
            return [Text(self.OPEN + held)] if calls is None else calls
        return [Text(held)] if held.strip() else []


class WholeReader(Reader):
    """Forms in which a call is the end of the answer: held from where it begins, read when the answer is over."""

    def __init__(self, names: Iterable[str] = (), id_length: int = 24) -> None:
        super().__init__(names, id_length)
        self._held = ""
        self._is_call: bool | None = None  # None: not known yet

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if self._is_call is None:
            self._is_call = self._begins(self._held)
        if self._is_call is False:
            return self._loose()
        return []

    def _begins(self, text: str) -> bool | None:
        raise NotImplementedError

    def _loose(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [Text(held)] if held else []

    def finish(self) -> list[Piece]:
        calls = self._read(self._held) if self._is_call else None
        return self._loose() if calls is None else calls

    def _read(self, text: str) -> list[Piece] | None:
        raise NotImplementedError


class LlamaReader(WholeReader):
    """`{"name": ..., "parameters": {...}}`, several with `; ` between, alone in the answer (Llama 3)."""

    def _begins(self, text: str) -> bool | None:
        begun = text.lstrip()
        if not begun or (PYTHON_TAG.startswith(begun) and begun != PYTHON_TAG):
            return None
        return begun.startswith((PYTHON_TAG, "{", "["))

    def _read(self, text: str) -> list[Piece] | None:
        rest = text.strip().removeprefix(PYTHON_TAG).strip()
        decoder, said = json.JSONDecoder(), list[Piece]()
        before = self.calls
        while rest:
            try:
                _, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                end = 0
            calls = self._calls_in(rest[:end]) if end else None
            if calls is None:
                self.calls = before
                return None
            said += calls
            rest = rest[end:].lstrip("; \n\t")
        return said or None


class MistralReader(WholeReader):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` again and again."""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if self._is_call:
            return []
        at = self._held.find(TOOL_CALLS)
        if at >= 0:
            self._is_call = True
            before, self._held = self._held[:at], self._held[at:]
        else:
            keep = _begun(self._held, TOOL_CALLS)
            before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return [Text(before)] if before else []

    def _read(self, text: str) -> list[Piece] | None:
        before, said = self.calls, list[Piece]()
        for part in text.split(TOOL_CALLS)[1:]:
            calls = self._calls_in(part) if part.lstrip().startswith(("[", "{")) else self._named(part)
            if calls is None:
                self.calls = before
                return None
            said += calls
        return said

    def _named(self, part: str) -> list[Piece] | None:
        name, _, arguments = part.replace("[ARGS]", "", 1).partition("{")
        try:
            read = json.loads("{" + arguments)
        except (ValueError, RecursionError):
            return None
        name = name.strip()
        return self._call(name, json.dumps(read, ensure_ascii=False)) if name in self._names else None


class ForcedReader(WholeReader):
    """A list of calls that a grammar has forced."""

    def _begins(self, text: str) -> bool | None:
        return True

    def _read(self, text: str) -> list[Piece] | None:
        return self._calls_in(text)


class NamedReader(Reader):
    """The arguments of the one tool that must be called, as a grammar has forced them: they stream as they come."""

    def __init__(self, name: str, id_length: int = 24) -> None:
        super().__init__((name,), id_length)
        self._name = name

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Arguments(0, text)] if self.calls else self._call(self._name, text)

    def finish(self) -> list[Piece]:
        return [] if self.calls else self._call(self._name, "")


def reader_for(tools: Tools | None, form: Form) -> Reader:
    """A fresh reader for one answer."""
    length = 9 if form == "mistral" else 24  # Mistral's templates refuse other ids
    if tools is None:
        return Reader()
    if tools.named:
        return NamedReader(tools.choice, length)
    if tools.choice == "required":
        return ForcedReader(tools.names, length)
    kinds = {"hermes": HermesReader, "llama3_json": LlamaReader, "mistral": MistralReader}
    return kinds[form](tools.names, length)


def form_of(template: str) -> Form:
    """The form that a model's chat template teaches; Hermes where it teaches none."""
    if TOOL_CALLS in template:
        return "mistral"
    if "<tool_call>" not in template and (PYTHON_TAG in template or '"parameters"' in template):
        return "llama3_json"
    return "hermes"


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may become `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if mark.startswith(text[-length:])), 0)


def read_whole(reader: Reader, text: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The text of a whole answer, and its calls as (id, name, arguments as JSON text)."""
    content, calls = "", list[tuple[str, str, str]]()
    for piece in [*reader.push(text), *reader.finish()]:
        match piece:
            case Text(said):
                content += said
            case Call(_, id, name):
                calls.append((id, name, ""))
            case Arguments(index, said):
                id, name, arguments = calls[index]
                calls[index] = (id, name, arguments + said)
    return content, [(id, name, arguments or "{}") for id, name, arguments in calls]
