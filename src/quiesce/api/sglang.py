"""SGLang's dialect, as its routers speak it to workers: bodies with bootstrap fields, and /generate."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from quiesce.api.answer import Answer, Step
from quiesce.api.backend import Bootstrap
from quiesce.api.errors import invalid
from quiesce.api.messages import refuse_unserved
from quiesce.api.parse import Wanted, chat_wanted, completion_wanted, decode
from quiesce.api.schemas import ChatBody, CompletionBody
from quiesce.api.shapes import Choice, Shape, Usage, encode

ROOM = (0, 2**63 - 1)
DEFAULT_NEW_TOKENS = 128

# What a router adds to a body. Values that ask for nothing are fine, others of these are refused.
NOTHING: dict[str, tuple[Any, ...]] = {
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "continue_final_message": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "lora_path": (),
    "session_params": (),
    "chat_template_kwargs": ({},),
    "stop_regex": ([],),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "input_embeds": (),
    "custom_logit_processor": (),
}
HINTS = (
    "separate_reasoning",
    "stream_reasoning",
    "log_metrics",
    "no_logs",
    "background",
    "return_bytes",
    "return_entropy",
    "return_text_in_logprobs",
    "data_parallel_rank",
    "decode_tp_size",
    "routing_key",
    "conversation_id",
)
ADDED: list[Any] = [
    ("bootstrap_host", str | list[str | None] | None, None),
    ("bootstrap_port", int | list[int | None] | None, None),
    ("bootstrap_room", int | list[int | None] | None, None),
    ("rid", str | list[str] | None, None),
    *((name, Any, None) for name in (*NOTHING, *HINTS)),
]
RULES: Any = {"forbid_unknown_fields": True, "kw_only": True}
ChatLegBody: Any = msgspec.defstruct("ChatLegBody", ADDED, bases=(ChatBody,), **RULES)
CompletionLegBody: Any = msgspec.defstruct("CompletionLegBody", ADDED, bases=(CompletionBody,), **RULES)


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    no_stop_trim: Any = None
    stop_regex: Any = None
    structural_tag: Any = None
    custom_params: Any = None
    stream_interval: Any = None


class _Generate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingParams | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    priority: int | None = None


GenerateBody: Any = msgspec.defstruct("GenerateBody", ADDED, bases=(_Generate,), **RULES)
_chat: Any = msgspec.json.Decoder(ChatLegBody)
_completion: Any = msgspec.json.Decoder(CompletionLegBody)
_generate: Any = msgspec.json.Decoder(GenerateBody)


def parse_chat_leg(raw: bytes) -> Wanted:
    """Raises ApiError 400 that names the field, as the two below."""
    body = decode(_chat, raw)
    return _leg(body, chat_wanted(body))


def parse_completion_leg(raw: bytes) -> Wanted:
    body = decode(_completion, raw)
    return _leg(body, completion_wanted(body))


def parse_generate(raw: bytes) -> Wanted:
    body = decode(_generate, raw)
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "either text or input_ids must be given, and not both")
    if body.return_logprob and body.logprob_start_len is not None and body.logprob_start_len >= 0:
        raise invalid("logprob_start_len", "must be -1: log-probabilities of the prompt are not told here")
    given = body.sampling_params or SamplingParams()
    refuse_unserved(given, NOTHING | {"structural_tag": (), "custom_params": ()}, "sampling_params.")
    fields = {
        name: getattr(given, name)
        for name in given.__struct_fields__
        if name in CompletionBody.__struct_fields__ and getattr(given, name) is not None
    }
    top = body.top_logprobs_num or 0
    completion = CompletionBody(
        model=body.model or "",
        prompt=body.text if body.text is not None else body.input_ids,
        max_tokens=DEFAULT_NEW_TOKENS if given.max_new_tokens is None else given.max_new_tokens,
        min_tokens=given.min_new_tokens,
        seed=given.sampling_seed,
        guided_json=given.json_schema,
        logprobs=top if body.return_logprob else None,
        stream=body.stream,
        priority=body.priority,
        **fields,
    )
    return msgspec.structs.replace(_leg(body, completion_wanted(completion)), origin=body)


def _leg(body: Any, wanted: Wanted) -> Wanted:
    refuse_unserved(body, NOTHING, "")
    hints = tuple(name for name in HINTS if getattr(body, name) not in (None, False, True))
    rid = body.rid if isinstance(body.rid, str) else ""
    pairs = _bootstraps(body, len(wanted.prompts), wanted.n)
    return msgspec.structs.replace(wanted, bootstraps=pairs, label=rid[:128], ignored=wanted.ignored + hints)


def _bootstraps(body: Any, prompts: int, samples: int) -> tuple[Bootstrap, ...]:
    """One for each answer, or none. A router sends one, or a list of one for each prompt or each answer."""
    given = body.bootstrap_room
    if samples > 1 and not (isinstance(given, list) and len(given) == prompts * samples):
        alone = _bootstraps(body, prompts, 1)
        return tuple(Bootstrap(b.host, b.port, room_of(b.room, n)) for b in alone for n in range(samples))
    prompts *= samples
    rooms = _each(given, prompts, "bootstrap_room")
    if all(room is None for room in rooms):
        return ()
    hosts = _each(body.bootstrap_host, prompts, "bootstrap_host")
    ports = _each(body.bootstrap_port, prompts, "bootstrap_port")
    for room in rooms:
        if room is None or not ROOM[0] <= room <= ROOM[1]:
            raise invalid("bootstrap_room", f"must be a number from 0 to {ROOM[1]} for every prompt")
    return tuple(Bootstrap(host or "", port, room) for host, port, room in zip(hosts, ports, rooms, strict=True))


def _each(value: Any, prompts: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * prompts
    if len(value) != prompts:
        raise invalid(name, f"has {len(value)} entries for {prompts}")
    return value


def room_of(room: int, sample: int) -> int:
    """The pairing id of one sample: both workers make the same from the one that a router has sent."""
    if sample == 0:
        return room
    digest = hashlib.blake2b(f"{room}/{sample}".encode(), digest_size=8, person=b"quiesce.room").digest()
    return int.from_bytes(digest, "little") >> 1


# ---------------------------------------------------------------- answers of /generate


class GenerateShape(Shape):
    id_prefix = "gnt"
    chunk_object = ""

    @property
    def single(self) -> bool:
        """A list of prompts is answered by a list, be it of one."""
        asked = self._wanted.origin
        ids = asked.input_ids
        listed = isinstance(asked.text, list) or bool(ids and isinstance(ids[0], list))
        return self._wanted.n == 1 and not listed

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        made = [self.part(choice, True) for choice in choices]
        return encode(made[0] if self.single else made)

    def part(self, choice: Choice, over: bool) -> dict[str, Any]:
        """What there is of one answer."""
        reason: dict[str, Any] | None = {"type": choice.finish_reason}
        if choice.finish_reason == "length":
            reason = {"type": "length", "length": len(choice.token_ids)}
        meta: dict[str, Any] = {
            "id": self.id,
            "finish_reason": reason if over else None,
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": choice.cached_tokens,
            "weight_version": "default",
        }
        if self._top is not None:
            found = [entry for entry in choice.entries if entry.logprob is not None]
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[e.logprob.logprob, e.token, None] for e in found if e.logprob]
            meta["output_top_logprobs"] = [
                [[logprob, token, None] for token, logprob in e.logprob.top[: self._top]] for e in found if e.logprob
            ]
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


class GenerateEvents:
    """Each event has all of its answer so far."""

    def __init__(self, shape: GenerateShape, wanted: Wanted) -> None:
        self._shape = shape
        self._so_far: dict[int, Choice] = {}

    def first(self, answers: int) -> bytes:
        return b""

    def step(self, index: int, step: Step) -> bytes:
        before = self._so_far.get(index, Choice("", [], "length"))
        reason: Literal["stop", "length"] = (step.verdict.finish_reason if step.verdict else None) or "length"
        now = self._so_far[index] = Choice(
            before.text + step.text,
            [*before.entries, *step.entries],
            reason,
            token_ids=[*before.token_ids, *step.token_ids],
            prompt_tokens=step.prompt_tokens,
            cached_tokens=step.verdict.cached_tokens if step.verdict else 0,
        )
        if not step.text and step.verdict is None:
            return b""
        part = self._shape.part(now, step.verdict is not None)
        return b"data: " + encode(part if self._shape.single else part | {"index": index}) + b"\n\n"

    def last(self, answers: list[Answer], total: Usage) -> bytes:
        return b"data: [DONE]\n\n"
