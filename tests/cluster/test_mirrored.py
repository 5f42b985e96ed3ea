"""The hand-off when pools lie apart from what transports move, as on a device: real workers, both directions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster
from quiesce.lab.idle import not_idle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

P, D = "prefill-0", "decode-0"
SIZES = {"page_size": 16, "chunked_prefill_size": 64, "max_running": 8, "context_length": 256}
APART = {"attention_backend": "torch", "deterministic": False}


@pytest.mark.parametrize(
    ("direction", "prefill", "decode"),
    [
        ("push", APART, APART),
        pytest.param("pull", APART, {}, marks=pytest.mark.long),
        pytest.param("push", {}, APART, marks=pytest.mark.long),
    ],
)
def test_l1_pages_move_through_the_mirror_and_the_answers_are_the_oracles(
    tiny: Path,
    run_dir: Path,
    oracle: Callable[..., list[list[int]]],
    direction: str,
    prefill: dict[str, str],
    decode: dict[str, str],
) -> None:
    prompts = [[8 + (7 * seed + 3 * at) % 480 for at in range(length)] for seed, length in enumerate((5, 64, 150))]
    with Cluster(tiny, run_dir, direction=direction, transfer="shm", dtype="float32", **SIZES) as cluster:
        cluster.spawn("prefill", P, max_total_tokens=256, **prefill)
        cluster.spawn("decode", D, max_total_tokens=512, **decode)
        cluster.wait_for(P, D)
        requests = [cluster.start(p, Sampling(max_tokens=12, ignore_eos=True), (P, D)) for p in prompts]
        cluster.until(lambda: all(request.over for request in requests), 60, "the answers")
        assert [request.tokens for request in requests] == oracle(prompts)
        for name in (P, D):
            cluster.until(lambda name=name: not not_idle(cluster.inspect(name)), 30, f"{name} to be idle")  # type: ignore[misc]
