"""Answers of /v1/responses, whole and as events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quiesce.api.answer import Answer, Entry, Step
from quiesce.api.detokenize import Vocabulary
from quiesce.api.logprobs import chat_logprobs
from quiesce.api.parse import Wanted
from quiesce.api.shapes import Choice, Shape, Usage, encode
from quiesce.api.toolcalls import Arguments, Call, Form, Text, read_whole

Status = Literal["in_progress", "completed", "incomplete"]


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`output`: messages and function calls, in order."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    tool_choice: Any
    tools: list[Any]
    text: Any
    max_output_tokens: int | None
    object: Literal["response"] = "response"
    error: None = None
    store: bool = False
    background: bool = False
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: None = None


class ResponseShape(Shape):
    id_prefix = "resp"
    chunk_object = ""

    def __init__(self, rid: str, model: str, vocabulary: Vocabulary, wanted: Wanted, form: Form = "hermes") -> None:
        super().__init__(rid, model, vocabulary, wanted, form)
        self.rid = rid
        self.id = f"resp_{rid}"

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        content, calls = read_whole(self.reader(), choice.text)
        output = []
        status: Status = "incomplete" if choice.finish_reason == "length" else "completed"
        if content or not calls:
            output.append(self.message(0, status, content, choice.entries))
        for id, name, arguments in calls:
            output.append(self.call(len(output), "completed", id, name, arguments))
        return encode(self.response(status, output, usage))

    def response(self, status: Status, output: list[dict[str, Any]], usage: Usage | None) -> ResponseAnswer:
        asked = self._wanted.origin
        return ResponseAnswer(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=output,
            usage=None if usage is None else _usage(usage),
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=asked.instructions,
            metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=asked.temperature,
            top_p=asked.top_p,
            tool_choice=asked.tool_choice or "auto",
            tools=asked.tools or [],
            text=asked.text or {"format": {"type": "text"}},
            max_output_tokens=asked.max_output_tokens,
        )

    def message(self, index: int, status: Status, text: str | None, entries: list[Entry]) -> dict[str, Any]:
        """text None: it has no content yet."""
        content = [] if text is None else [self.part(text, entries)]
        id = f"msg_{self.rid}_{index}"
        return {"type": "message", "id": id, "status": status, "role": "assistant", "content": content}

    def part(self, text: str, entries: list[Entry]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.shown(entries)}

    def shown(self, entries: list[Entry]) -> list[Any]:
        return [] if self._top is None else list(chat_logprobs(self._vocabulary, entries, self._top).content)

    def call(self, index: int, status: Status, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        made = {"type": "function_call", "id": f"fc_{self.rid}_{index}", "call_id": call_id, "name": name}
        return made | {"arguments": arguments, "status": status}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


class ResponseEvents:
    """Items open, grow and close one after the other; every event has its number."""

    def __init__(self, shape: ResponseShape, wanted: Wanted) -> None:
        self._shape = shape
        self._reader = shape.reader()
        self._number = 0
        self._done: list[dict[str, Any]] = []
        self._open: Literal["", "message", "call"] = ""
        self._text, self._entries = "", list[Entry]()
        self._call = Call(0, "", "")
        self._status: Status = "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"

    def first(self, answers: int) -> bytes:
        begun = self._shape.response("in_progress", [], None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def step(self, index: int, step: Step) -> bytes:
        if step.verdict is not None and step.verdict.finish_reason == "length":
            self._status = "incomplete"
        pieces = self._reader.push(step.text)
        if step.verdict is not None:
            pieces += self._reader.finish()
        said, entries = b"", step.entries
        for piece in pieces:
            match piece:
                case Text(text):
                    said += self._say(text, entries)
                    entries = []
                case Call():
                    said += self._close() + self._begin_call(piece)
                case Arguments(_, text):
                    self._text += text
                    kind = "response.function_call_arguments.delta"
                    said += self._event(kind, **self._place("fc"), delta=text)
        return said

    def _place(self, kind: str) -> dict[str, Any]:
        number = len(self._done)
        return {"item_id": f"{kind}_{self._shape.rid}_{number}", "output_index": number}

    def _say(self, text: str, entries: list[Entry]) -> bytes:
        said = b""
        number = len(self._done)
        if self._open != "message":
            said = self._close()
            number = len(self._done)
            self._open, self._text, self._entries = "message", "", []
            item = self._shape.message(number, "in_progress", None, [])
            said += self._event("response.output_item.added", output_index=number, item=item)
            part = self._shape.part("", [])
            said += self._event("response.content_part.added", **self._place("msg"), content_index=0, part=part)
        self._text += text
        self._entries += entries
        place = self._place("msg") | {"content_index": 0}
        logprobs = self._shape.shown(entries)
        return said + self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def _begin_call(self, call: Call) -> bytes:
        self._open, self._text, self._call = "call", "", call
        item = self._shape.call(len(self._done), "in_progress", call.id, call.name, "")
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _close(self) -> bytes:
        """Ends the item that is open."""
        number, said = len(self._done), b""
        if self._open == "message":
            item = self._shape.message(number, self._status, self._text, self._entries)
            place = self._place("msg") | {"content_index": 0}
            logprobs = self._shape.shown(self._entries)
            said += self._event("response.output_text.done", **place, text=self._text, logprobs=logprobs)
            said += self._event("response.content_part.done", **place, part=item["content"][0])
        elif self._open == "call":
            call, arguments = self._call, self._text or "{}"
            item = self._shape.call(number, "completed", call.id, call.name, arguments)
            kind = "response.function_call_arguments.done"
            said += self._event(kind, **self._place("fc"), name=call.name, arguments=arguments)
        else:
            return b""
        said += self._event("response.output_item.done", output_index=number, item=item)
        self._done.append(item)
        self._open = ""
        return said

    def last(self, answers: list[Answer], total: Usage) -> bytes:
        said = self._close()
        if not self._done:  # an answer without any text is a message all the same
            said += self._say("", []) + self._close()
        whole = self._shape.response(self._status, self._done, total)
        return said + self._event(f"response.{self._status}", response=whole)
