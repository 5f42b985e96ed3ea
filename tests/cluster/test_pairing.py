"""Two legs that share a room and nothing else."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling, Start
from quiesce.lab.cluster import ROUTER_EPOCH, Cluster, LabRequest
from quiesce.lab.idle import not_idle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS = {"prefill-0": tuple(range(10, 60)), "decode-0": tuple(range(60, 110))}


@pytest.mark.parametrize("other", [PROMPTS["decode-0"], PROMPTS["prefill-0"][:-1]], ids=["tokens", "length"])
def test_l9_legs_about_different_prompts_are_refused_and_nothing_is_posted(
    tiny: Path, run_dir: Path, other: tuple[int, ...]
) -> None:
    with Cluster(tiny, run_dir, page_size=16, chunked_prefill_size=64, max_total_tokens=2048) as cluster:
        for name in PROMPTS:
            cluster.spawn(name.partition("-")[0], name)
        cluster.wait_for(*PROMPTS)
        request = LabRequest(secrets.token_hex(8), PROMPTS["prefill-0"], tuple(PROMPTS), time.monotonic())
        cluster.requests[request.rid] = request
        prefill = cluster.workers["prefill-0"].address
        # Prefill's first: an offer waits for its leg for two seconds only.
        for name, prompt in (("prefill-0", PROMPTS["prefill-0"]), ("decode-0", other)):
            sampling = Sampling(max_tokens=4, ignore_eos=True)
            address = prefill if name == "decode-0" else None
            cluster._send(name, Start(request.rid, ROUTER_EPOCH, 7, prompt, sampling, 30_000, address))
        cluster.until(lambda: request.over, 30, "both legs to end")
        (ended,) = request.ends["prefill-0"]
        assert (ended.outcome, ended.status) == ("failed", 409) and ended.reason.startswith("pairing: ")
        # Decode hears it from prefill, or from the router that prefill told: whichever comes first.
        assert request.ends["decode-0"][0].outcome in ("failed", "cancelled") and not request.tokens
        for name in PROMPTS:
            cluster.until(lambda name=name: not not_idle(cluster.inspect(name)), 30, f"{name} to be idle")
