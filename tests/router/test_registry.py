"""Who may be given work, and what happens to legs when a worker leaves. Time is a number here."""

from __future__ import annotations

from typing import Any

import msgspec

from quiesce.core.codec import Codec
from quiesce.core.fingerprint import Fingerprint, Limits
from quiesce.core.messages import (
    Address,
    Exited,
    Register,
    Sampling,
    Start,
)
from quiesce.router import pairing
from quiesce.router.health import Standing, report
from quiesce.router.registry import Connect, Lost, Patience, Registry, Silent, Worker

FINGERPRINT = Fingerprint("m", "w", "float32", "page-major/row", 16, 4096, 2, 2, 16)


def register(name: str = "decode-0", epoch: int = 1, **fields: Any) -> Register:
    key = fields.pop("key", f"key-{name}")
    role = fields.pop("role", name.split("-", maxsplit=1)[0])
    return Register(
        role=role,
        address=Address(name, epoch, "tcp://127.0.0.1:1", key),
        fingerprint=fields.pop("fingerprint", FINGERPRINT),
        limits=fields.pop("limits", Limits(512, 4096, 8)),
        **({"progress": 0, "queued": 0, "running": 0} | fields),
    )


def beat(registry: Registry, message: Register, now: float = 0.0) -> list[Any]:
    return registry.on_register(message, message.address.public_key, now)


def up(registry: Registry, *names: str, now: float = 0.0, **fields: Any) -> list[Worker]:
    for name in names:
        beat(registry, register(name, **fields), now)
        registry.on_link(registry.workers[name], up=True)
    return [registry.workers[name] for name in names]


def test_a_new_epoch_under_the_same_name_ends_the_old_one_at_once() -> None:
    registry = Registry()
    (old,) = up(registry, "decode-0")
    changes = beat(registry, register(epoch=2))
    assert isinstance(changes[0], Lost) and changes[0].worker is old and changes[0].gone
    assert isinstance(changes[1], Connect) and changes[1].worker.epoch == 2
    assert beat(registry, register(epoch=1)) == [] and registry.refused == 1  # a late heartbeat revives nobody
    assert registry.workers["decode-0"].epoch == 2


def test_a_worker_speaks_for_its_own_key_alone() -> None:
    registry = Registry()
    assert registry.on_register(register(), "another key", 0.0) == [] and not registry.workers
    up(registry, "decode-0")
    assert beat(registry, register(epoch=2, key="thief")) == []
    assert registry.workers["decode-0"].epoch == 1
    up(registry, "prefill-0")
    assert registry.on_exited(Exited("decode-0", 1), "key-prefill-0", 0.0) == []
    assert registry.refused == 3


def test_exited_ends_the_epoch_it_names_and_no_other() -> None:
    registry = Registry()
    up(registry, "decode-0")
    assert registry.on_exited(Exited("decode-0", 9), "supervisor", 0.0) == []
    (lost,) = registry.on_exited(Exited("decode-0", 1), "supervisor", 0.0)
    assert lost.gone and not registry.workers
    assert beat(registry, register()) == []


def test_silence_is_first_no_new_work_then_lost_legs_then_forgotten() -> None:
    registry = Registry(Patience(silent=4, lost=8, forgotten=60))
    (worker,) = up(registry, "decode-0")
    found: dict[float, list[Any]] = {}
    for tick in range(260):
        now = tick / 4
        if changes := registry.sweep(now):
            found[now] = changes
    assert [(when, type(c[0]), getattr(c[0], "gone", None)) for when, c in found.items()] == [
        (4.25, Silent, None),
        (8.25, Lost, False),
        (60.25, Lost, True),
    ]
    assert not registry.workers and worker.trouble(5.0, registry.patience) is not None
    assert isinstance(beat(registry, register())[0], Connect)  # silence is no proof of death: it may return


def test_patience_is_the_hold_timeout_a_silent_worker_is_only_not_chosen_before() -> None:
    registry = Registry(Patience.for_hold_timeout(30.0))
    up(registry, "decode-0")
    found = {now: registry.sweep(now) for now in (tick / 4 for tick in range(400))}
    changes = {now: [type(change) for change in what] for now, what in found.items() if what}
    assert changes == {4.25: [Silent], 30.25: [Lost], 60.25: [Lost]}
    assert Patience.for_hold_timeout(2.0).silent == 2.0
    assert Patience.for_hold_timeout(600.0).forgotten > 600.0


def test_a_pause_of_the_router_itself_is_not_silence_of_its_workers() -> None:
    registry = Registry()
    (worker,) = up(registry, "decode-0")
    registry.sweep(0.25)
    assert registry.sweep(100.0) == []
    assert worker.trouble(100.0, registry.patience) is None


def test_a_loop_that_stands_still_with_work_is_not_chosen() -> None:
    registry = Registry(Patience(stalled=30))
    (worker,) = up(registry, "decode-0")
    for now in range(40):
        beat(registry, register(progress=5, running=1), now)
    assert "has not moved" in (worker.trouble(39, registry.patience) or "")
    beat(registry, register(progress=6, running=1), 39.0)
    assert worker.trouble(39, registry.patience) is None
    for now in range(40, 90):
        beat(registry, register(progress=6), now)  # idle: nothing to move
    assert worker.trouble(89, registry.patience) is None


def test_scenario_d43_both_members_of_a_pair_must_be_available() -> None:
    registry = Registry()
    p, d = up(registry, "prefill-0", "decode-0")
    assert pairing.choose([p, d], pairing.Wish(1)) == pairing.Pair(d, p)
    (lost,) = registry.on_link(p, up=False)
    assert not lost.gone
    left = pairing.usable(registry.workers.values(), 0.0, registry.patience)
    assert left == [d] and pairing.choose(left, pairing.Wish(2)) is None
    assert pairing.missing(left) == ["no prefill worker is usable"]
    registry.on_link(p, up=True)
    assert pairing.choose(pairing.usable([p, d], 0.0, registry.patience), pairing.Wish(3)) is not None


def test_a_server_of_colocated_workers_does_not_ask_for_prefill() -> None:
    registry = Registry()
    (one,) = up(registry, "colocated-0")
    registry.on_link(one, up=False)
    left = pairing.usable([one], 0.0, registry.patience)
    assert pairing.missing(left, [one]) == ["no colocated worker is usable"]
    (p,) = up(registry, "prefill-0")
    assert pairing.missing(left, [one, p]) == ["no prefill worker is usable", "no decode worker is usable"]


def test_the_least_loaded_pair_is_chosen_and_ties_go_round() -> None:
    registry = Registry()
    workers = up(registry, "prefill-0", "prefill-1", "decode-0", "decode-1")
    turns = [pairing.choose(workers, pairing.Wish(turn)) for turn in range(1, 5)]
    assert {pair.prefill.name for pair in turns[:2] if pair and pair.prefill} == {"prefill-0", "prefill-1"}
    assert {pair.decode.name for pair in turns[:2] if pair} == {"decode-0", "decode-1"}
    workers[0].legs.update("abc")
    workers[3].legs.update("ab")
    for turn in range(5, 9):
        pair = pairing.choose(workers, pairing.Wish(turn))
        assert pair == pairing.Pair(workers[2], workers[1])


def test_different_fingerprints_are_not_paired_and_the_field_is_named() -> None:
    registry = Registry()
    (p,) = up(registry, "prefill-0")
    (d,) = up(registry, "decode-0", fingerprint=msgspec.structs.replace(FINGERPRINT, page_size=32))
    assert pairing.choose([p, d], pairing.Wish(1)) is None
    healthy, detail = report(registry, 0.0, False, Standing())
    assert not healthy
    assert detail["missing"] == ["prefill-0 and decode-0 are not paired: page_size: 16 != 32"]


def test_push_and_pull_are_not_paired() -> None:
    registry = Registry()
    up(registry, "prefill-0")
    up(registry, "decode-0", fingerprint=msgspec.structs.replace(FINGERPRINT, direction="pull"))
    _, detail = report(registry, 0.0, False, Standing())
    assert detail["missing"] == ["prefill-0 and decode-0 are not paired: direction: 'push' != 'pull'"]


def test_health_says_what_makes_a_worker_less_safe() -> None:
    registry = Registry()
    up(registry, "prefill-0")
    up(registry, "decode-0", cautions=("tcp cannot prove that what was posted has ended",))
    _, detail = report(registry, 0.0, False, Standing())
    assert [worker["cautions"] for worker in detail["workers"]] == [
        ["tcp cannot prove that what was posted has ended"],
        [],
    ]


def test_d3_the_limit_of_the_pairs_is_the_least_of_context_and_pools() -> None:
    registry = Registry()
    assert pairing.context_limit([]) is None
    (p,) = up(registry, "prefill-0", limits=Limits(512, 400, 8))
    assert pairing.context_limit([p]) is None
    (d,) = up(registry, "decode-0", limits=Limits(512, 300, 8))
    assert pairing.context_limit([p, d]) == 300
    (other,) = up(
        registry,
        "prefill-1",
        limits=Limits(512, 5, 8),
        fingerprint=msgspec.structs.replace(FINGERPRINT, dtype="bfloat16"),
    )
    assert pairing.context_limit([p, d, other]) == 300  # it is in no pair


def test_d3_the_agreed_limit_falls_at_once_and_rises_when_all_have_said_so() -> None:
    registry = Registry()
    p, d = up(registry, "prefill-0", "decode-0", limits=Limits(512, 400, 8))
    assert pairing.agreed_limit([p]) is None
    assert pairing.agreed_limit([p, d]) == 400, "before anybody was told"
    (small,) = up(registry, "decode-1", limits=Limits(512, 300, 8))
    assert pairing.agreed_limit([p, d, small]) == 300, "though the others were told 400"
    for name in ("prefill-0", "decode-0"):
        beat(registry, register(name, limits=Limits(512, 400, 8), agreed=300))
    assert pairing.agreed_limit([p, d]) == 300, "the small one is gone, and they still go by its limit"
    beat(registry, register("prefill-0", limits=Limits(512, 400, 8), agreed=400))
    assert pairing.agreed_limit([p, d]) == 300
    beat(registry, register("decode-0", limits=Limits(512, 400, 8), agreed=400))
    assert pairing.agreed_limit([p, d]) == 400


def test_health_names_what_computes_a_workers_steps() -> None:
    registry = Registry()
    up(registry, "prefill-0", step="native avx2")
    up(registry, "decode-0", step="plain PyTorch: the native step is off")
    _, detail = report(registry, 0.0, False, Standing())
    told = {worker["name"]: worker["step"] for worker in detail["workers"]}
    assert told == {"prefill-0": "native avx2", "decode-0": "plain PyTorch: the native step is off"}


def test_health_names_the_transfer_engine_of_each_pair_and_why() -> None:
    registry = Registry()
    up(registry, "prefill-0", transfers=("shm: both are on one host (2 peers)",))
    up(registry, "decode-0")
    _, detail = report(registry, 0.0, False, Standing())
    told = {worker["name"]: worker["transfers"] for worker in detail["workers"]}
    assert told == {"prefill-0": ["shm: both are on one host (2 peers)"], "decode-0": []}


def test_a_full_worker_is_healthy_and_not_chosen() -> None:
    registry = Registry()
    p, d = up(registry, "prefill-0", "decode-0")
    d.legs.update(str(i) for i in range(8))
    assert report(registry, 0.0, False, Standing(8))[0]
    assert pairing.choose([p, d], pairing.Wish(1)) is None


def test_the_limit_is_also_what_one_message_carries() -> None:
    """A prompt that could not be sent is refused by its length, with the limit in the answer."""
    registry = Registry()
    huge = Limits(context_length=1 << 24, pool_tokens=1 << 24, max_queued=8)
    workers = up(registry, "prefill-0", "decode-0", limits=huge)
    limit = pairing.context_limit(workers)
    assert limit is not None and limit < 1 << 24
    longest = Start("r" * 40, 1 << 63, 1 << 62, (1 << 31,) * limit, Sampling(max_tokens=1), 1000)
    assert len(Codec().encode(longest)) <= Codec.MAX_BYTES
