"""From a checked request to what workers are asked: token ids and sampling for each answer, inside every limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from quiesce.api.answer import Answer, Echo
from quiesce.api.backend import Ask
from quiesce.api.chat import TextModel, too_long
from quiesce.api.detokenize import TextStream
from quiesce.api.errors import invalid
from quiesce.api.parse import Wanted
from quiesce.core.messages import Sampling


async def tokenize(wanted: Wanted, text: TextModel, limit: int) -> list[tuple[int, ...]]:
    """The token ids of each prompt. Raises ApiError 400, also for a prompt that is hopelessly long for `limit`."""
    tools = wanted.tools.shown if wanted.tools else []
    prompts = [await text.encode(one, limit, _where(wanted, i), tools) for i, one in enumerate(wanted.prompts)]
    text.checked(wanted.stop_token_ids, "stop_token_ids")
    text.checked((id for id, _ in wanted.logit_bias), "logit_bias")
    if wanted.grammar:
        await text.check_grammar(wanted.grammar, wanted.grammar_field)
    return prompts


def _where(wanted: Wanted, i: int) -> str:
    return f"{wanted.kind}[{i}]" if len(wanted.prompts) > 1 else wanted.kind


def asks(
    wanted: Wanted,
    prompts: list[tuple[int, ...]],
    defaults: dict[str, Any],
    limit: int,
    *,
    rid: str,
    label: str,
    deadline: float,
    tenant: str = "",
    salt: str = "",
) -> list[Ask]:
    """One for each (prompt, sample), prompt by prompt.

    Raises ApiError 400 when a prompt and its answer would be more than `limit` tokens.
    """
    single = len(prompts) * wanted.n == 1
    found: list[Ask] = []
    for i, ids in enumerate(prompts):
        if len(ids) >= limit:
            raise too_long(_where(wanted, i), len(ids), limit)
        # Both legs of a pair draw from one seed, and their router sends none: it comes from the room.
        unseeded = wanted.bootstraps[len(found)].room if wanted.bootstraps else random.getrandbits(63)
        sampling = _sampling(wanted, len(ids), defaults, limit, unseeded)
        for sample in range(wanted.n):
            own = rid if single else f"{rid}-{len(found)}"
            group = f"{rid}/{i}" if wanted.n > 1 else ""
            drawn = sampling(sample)
            exact = wanted.seed is not None or drawn.temperature == 0
            pair = wanted.bootstraps[len(found)] if wanted.bootstraps else None
            ask = Ask(own, label, ids, drawn, deadline, group, wanted.priority, tenant, exact, pair, salt)
            found.append(ask)
    return found


def _sampling(
    wanted: Wanted, prompt: int, defaults: dict[str, Any], limit: int, unseeded: int
) -> Callable[[int], Sampling]:
    """Sample number -> how its tokens are drawn: all the same way, each from its own seed."""
    room = limit - prompt
    max_tokens = room if wanted.max_tokens is None else wanted.max_tokens
    if max_tokens > room:
        raise invalid(
            "max_tokens",
            f"{max_tokens} and the prompt's {prompt} tokens are more than the {limit} tokens that prompt "
            f"and answer together may have here; at most {room} are left",
            "context_length_exceeded",
        )
    if wanted.min_tokens > max_tokens:
        raise invalid("min_tokens", f"{wanted.min_tokens} is more than the {max_tokens} that max_tokens allows")
    fields = defaults | wanted.given
    seed = wanted.seed
    if seed is None:
        seed = 0 if fields["temperature"] == 0 else unseeded
    shown = [top for top in (wanted.prompt_logprobs, wanted.logprobs if wanted.echo else None) if top is not None]

    def sample(number: int) -> Sampling:
        return Sampling(
            max_tokens=max(1, max_tokens),
            seed=_wrapped(seed + number),
            logit_bias=wanted.logit_bias,
            min_tokens=wanted.min_tokens,
            stop_token_ids=wanted.stop_token_ids,
            ignore_eos=wanted.ignore_eos,
            logprobs=wanted.logprobs,
            prompt_logprobs=max(shown, default=None),
            grammar=wanted.grammar,
            **fields,
        )

    return sample


def _wrapped(seed: int) -> int:
    """Into 64 bits with a sign, as a client may write it."""
    return (seed + 2**63) % 2**64 - 2**63


def answers(wanted: Wanted, asked: list[Ask], text: TextModel) -> list[Answer]:
    """What turns the tokens of each ask into text."""
    silent = (*wanted.stop_token_ids, *(() if wanted.ignore_eos else text.eos_ids))
    logprobs = wanted.logprobs is not None
    shown = text.tool_markers if wanted.tools else frozenset()
    echoes = [
        _echo(prompt, ask.token_ids, text) if wanted.echo else None
        for prompt, ask in zip((p for p in wanted.prompts for _ in range(wanted.n)), asked, strict=True)
    ]
    return [
        Answer(
            TextStream(text.vocabulary, wanted.stops, silent, wanted.min_tokens, shown),
            logprobs,
            echo,
            only_echo=wanted.max_tokens == 0,
            prompt_tokens=len(ask.token_ids),
        )
        for echo, ask in zip(echoes, asked, strict=True)
    ]


def _echo(prompt: Any, ids: tuple[int, ...], text: TextModel) -> Echo:
    """The prompt as it was given; when it was given as ids, their text."""
    stream = TextStream(text.vocabulary)
    decoded = stream.push(ids) + stream.flush()
    return Echo(ids, prompt if isinstance(prompt, str) else decoded, stream.offsets)
