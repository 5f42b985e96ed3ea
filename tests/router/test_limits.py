"""Workers of different sizes: a prompt is answered or refused by what both can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quiesce.api.chat import TextModel
from quiesce.core.messages import Limits
from router.cluster import MODEL, cluster

pytestmark = pytest.mark.anyio

LEAST, MOST = 100, 160  # tokens that prefill and decode can hold
LENGTHS = (LEAST - 2, LEAST - 1, LEAST, LEAST + 1, MOST - 1, MOST, MOST + 1)
SIZES = ((LEAST, MOST), (MOST, LEAST))


def usage_of(text: str, stream: bool) -> dict[str, Any]:
    if not stream:
        return dict(json.loads(text)["usage"])
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return dict(events[-1]["usage"])


@pytest.mark.parametrize("sizes", SIZES, ids=("prefill is smaller", "decode is smaller"))
@pytest.mark.parametrize("stream", [False, True])
async def test_scenario_d4_a_prompt_around_either_workers_limit_is_answered_whole_or_refused_with_the_limit(
    tmp_path: Path, text: TextModel, sizes: tuple[int, int], stream: bool
) -> None:
    workers = [
        {"role": role, "limits": Limits(512, size, 512)}
        for role, size in zip(("prefill", "decode"), sizes, strict=True)
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with cluster(tmp_path, text, workers) as c:
        frame = len(await text.encode_chat([{"role": "user", "content": ""}]))
        for length in LENGTHS:
            said = "\x01" * (length - frame)  # a token a character, in every tokenizer of bytes
            asked = {
                "/v1/completions": {"prompt": [5] * length},
                "/v1/chat/completions": {"messages": [{"role": "user", "content": said}]},
            }
            for path, fields in asked.items():
                await c.heard(len(c.decode.starts))
                before = len(c.decode.starts), len(c.prefill.starts)
                body = {"model": MODEL, "max_tokens": 1, **fields, **options}
                answer = await c.client.post(path, json=body)
                if length < LEAST:
                    assert answer.status_code == 200, answer.text
                    (sent,) = list(c.decode.starts.values())[before[0] :]
                    assert usage_of(answer.text, stream)["prompt_tokens"] == len(sent.token_ids) == length
                else:
                    assert answer.status_code == 400, answer.text
                    error = answer.json()["error"]
                    assert str(LEAST) in error["message"] and error["code"] == "context_length_exceeded"
                    assert (len(c.decode.starts), len(c.prefill.starts)) == before, "nobody has heard of it"
        await c.idle()
