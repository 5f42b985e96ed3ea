from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_cluster import OBEDIENT, FakeCluster, alive_in_group

from quiesce.ops.supervisor import Timing

ALL = {"router", "prefill-0", "decode-0"}


def obedient(tmp_path: Path, **kwargs: Timing) -> FakeCluster:
    return FakeCluster(tmp_path, dict.fromkeys(sorted(ALL, reverse=True), OBEDIENT), set(ALL), **kwargs)


def test_it_says_once_that_it_is_ready_and_a_stop_drains_the_router_before_the_workers(tmp_path: Path) -> None:
    cluster = obedient(tmp_path)
    groups: list[int] = []

    async def story() -> None:
        await cluster.until(lambda: cluster.ready_calls)
        await cluster.until(lambda: all(f"hello from {name}" in cluster.output for name in ALL))
        groups.extend(cluster.pid(name) for name in ALL)
        os.kill(os.getpid(), signal.SIGTERM)

    assert cluster.play(story) == 0
    assert cluster.ready_calls == 1
    ended = cluster.log.read_text().split()
    assert ended[0] == "router"
    assert sorted(ended) == sorted(ALL)
    assert not any(alive_in_group(group) for group in groups)
    assert "router    | hello from router" in cluster.output
    assert len(cluster.starts) == 3


def test_a_worker_that_is_killed_is_started_again_as_another_and_the_router_is_told_of_the_dead_one(
    tmp_path: Path,
) -> None:
    cluster = obedient(tmp_path)

    async def story() -> None:
        await cluster.until(lambda: cluster.ready_calls)
        first = cluster.children["decode-0"].epoch
        os.kill(cluster.pid("decode-0"), signal.SIGKILL)
        await cluster.until(lambda: len(cluster.starts) == 4)
        assert cluster.told == [("decode-0", first)]
        assert cluster.children["decode-0"].epoch != first
        await cluster.until(lambda: "decode-0 is ready again" in cluster.output)
        cluster.supervisor.stop()

    assert cluster.play(story) == 0
    assert "decode-0 was killed by SIGKILL; starting it again in 0.2 s." in cluster.output
    assert [name for name, _ in cluster.starts].count("prefill-0") == 1
    assert cluster.ready_calls == 1


def test_a_worker_that_retains_too_much_is_started_again_later_each_time(tmp_path: Path) -> None:
    cluster = FakeCluster(
        tmp_path,
        {"router": OBEDIENT, "decode-0": "echo hello from decode-0; sleep 0.3; exit 75"},
        {"router", "decode-0"},
    )

    async def story() -> None:
        await cluster.until(lambda: [name for name, _ in cluster.starts].count("decode-0") == 3)
        cluster.supervisor.stop()

    assert cluster.play(story) == 0
    said = "decode-0 restarts because it keeps what only a new process gives back; its log says what"
    assert f"{said}; starting it again in 0.2 s." in cluster.output
    assert f"{said} (2 in a row); starting it again in 0.4 s." in cluster.output
    assert len({epoch for name, epoch in cluster.starts if name == "decode-0"}) == 3


def test_a_router_that_dies_is_started_again_and_not_announced(tmp_path: Path) -> None:
    cluster = obedient(tmp_path)

    async def story() -> None:
        await cluster.until(lambda: cluster.ready_calls)
        os.kill(cluster.pid("router"), signal.SIGKILL)
        await cluster.until(lambda: len(cluster.starts) == 4)
        assert cluster.told == []
        cluster.supervisor.stop()

    assert cluster.play(story) == 0


def test_a_child_that_fails_at_start_five_times_ends_it_with_the_reason_and_its_last_words(tmp_path: Path) -> None:
    scripts = {"router": OBEDIENT, "prefill-0": "echo no memory for the pool >&2; exit 3"}
    cluster = FakeCluster(tmp_path, scripts, {"router"})
    assert cluster.play() == 1
    assert [name for name, _ in cluster.starts].count("prefill-0") == 5
    reason = "Quiesce cannot start: prefill-0 ended with exit code 3 5 times in a row, and was never ready."
    after = cluster.output.split(reason)[1]
    assert "no memory for the pool" in after
    assert "starting it again in 1.6 s" in cluster.output
    assert cluster.log.read_text().split() == ["router"]
    assert cluster.ready_calls == 0


def test_a_child_that_refuses_its_settings_is_not_asked_again(tmp_path: Path) -> None:
    scripts = {"router": OBEDIENT, "prefill-0": "echo unknown architecture >&2; exit 2"}
    cluster = FakeCluster(tmp_path, scripts, {"router"})
    assert cluster.play() == 1
    assert len(cluster.starts) == 2
    assert "prefill-0 ended with exit code 2, and was never ready" in cluster.output


def test_a_program_that_is_not_there_is_a_failed_start(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, {"router": OBEDIENT}, set())
    cluster.supervisor._environment = {"PATH": "/nonexistent"}
    assert cluster.play() == 1
    assert "router could not be started: [Errno 2]" in cluster.output


def test_a_child_that_does_not_get_ready_in_time_is_killed_and_tried_again(tmp_path: Path) -> None:
    cluster = FakeCluster(
        tmp_path, {"router": OBEDIENT, "decode-0": OBEDIENT}, {"router"}, Timing(drain=5, start=0.5, grace=5)
    )
    assert cluster.play() == 1
    assert "decode-0 was not ready within 0.5 s 5 times in a row" in cluster.output


def test_a_second_stop_cuts_the_drain_short(tmp_path: Path) -> None:
    stubborn = (
        "n=0; trap 'n=$((n+1)); echo {name} >> {log}; [ $n = 2 ] && exit 0' TERM; "
        "echo up; while :; do sleep 0.02; done"
    )
    cluster = FakeCluster(tmp_path, {"router": stubborn}, {"router"}, Timing(drain=60, start=60, grace=30))

    async def story() -> None:
        await cluster.until(lambda: cluster.ready_calls)
        cluster.supervisor.stop()
        await cluster.until(lambda: cluster.log.read_text().split() == ["router"])
        cluster.supervisor.stop()

    started = time.monotonic()
    assert cluster.play(story) == 0
    assert time.monotonic() - started < 30
    assert cluster.log.read_text().split() == ["router", "router"]


def test_a_straggler_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    deaf = "trap '' TERM; sleep 600 & echo started; while :; do sleep 0.02; done"
    cluster = FakeCluster(tmp_path, {"router": deaf}, {"router"}, Timing(drain=0.05, start=60, grace=0.05))
    groups: list[int] = []

    async def story() -> None:
        await cluster.until(lambda: "router | started" in cluster.output)
        await cluster.until(lambda: cluster.ready_calls)
        groups.append(cluster.pid("router"))
        cluster.supervisor.stop()

    assert cluster.play(story) == 1
    assert "router did not end in time and is killed" in cluster.output
    assert not alive_in_group(groups[0])


def test_what_a_dead_worker_had_started_dies_before_it_is_announced(tmp_path: Path) -> None:
    with_mover = "sleep 600 & echo mover; while :; do sleep 0.02; done"
    cluster = FakeCluster(tmp_path, {"router": OBEDIENT, "prefill-0": with_mover}, {"router", "prefill-0"})
    found: list[bool] = []
    group: list[int] = []
    cluster.supervisor._announce = lambda name, epoch: found.append(alive_in_group(group[0]))

    async def story() -> None:
        await cluster.until(lambda: "prefill-0 | mover" in cluster.output)
        group.append(cluster.pid("prefill-0"))
        os.kill(group[0], signal.SIGKILL)
        await cluster.until(lambda: found)
        cluster.supervisor.stop()

    assert cluster.play(story) == 0
    assert found[0] is False


def test_long_lines_and_wild_bytes_of_a_child_are_shown_in_pieces(tmp_path: Path) -> None:
    wild = "printf '\\377ab\\n'; head -c 100000 /dev/zero | tr '\\0' x; echo; echo tail; while :; do sleep 0.02; done"
    cluster = FakeCluster(tmp_path, {"router": wild}, {"router"})

    async def story() -> None:
        await cluster.until(lambda: "router | tail" in cluster.output)
        cluster.supervisor.stop()

    cluster.play(story)
    assert "router | \ufffdab" in cluster.output
    assert cluster.output.count("x") >= 100_000
    assert max(len(line) for line in cluster.output.splitlines()) < 100_000


def test_kill_9_of_the_supervisor_kills_its_children(tmp_path: Path) -> None:
    driver = f"""
import sys; sys.path.insert(0, {os.fspath(Path(__file__).parent)!r})
from pathlib import Path
from fake_cluster import OBEDIENT, FakeCluster
scripts = {{"router": OBEDIENT, "decode-0": OBEDIENT}}
cluster = FakeCluster(Path({os.fspath(tmp_path)!r}), scripts, set(scripts))
async def story():
    await cluster.until(lambda: cluster.ready_calls)
    await cluster.until(lambda: cluster.output.count("hello from") == 2)
    print(cluster.pid("router"), cluster.pid("decode-0"), flush=True)
    await cluster.until(lambda: False)
cluster.play(story)
"""
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    groups = [int(pid) for pid in process.stdout.readline().split()]
    assert len(groups) == 2
    assert all(alive_in_group(group) for group in groups)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while any(alive_in_group(group) for group in groups):
        if time.monotonic() > deadline:
            pytest.fail("children of a killed supervisor live on")
        time.sleep(0.01)


def test_a_worker_that_falls_silent_long_after_its_start_is_given_the_whole_time_again(tmp_path: Path) -> None:
    """As one that is stopped and goes on: not known to be dead, so not ended for having started long ago."""
    cluster = obedient(tmp_path, timing=Timing(drain=5.0, start=2.5, grace=5.0))

    async def story() -> None:
        await cluster.until(lambda: cluster.ready_calls)
        child = cluster.children["decode-0"]
        child.waiting_since -= 3600.0  # it was started an hour ago
        first = child.epoch
        cluster.ready.discard("decode-0")
        await cluster.until(lambda: child.restarts.ready_since is None)
        cluster.ready.add("decode-0")
        await cluster.until(lambda: child.restarts.ready_since is not None)
        assert child.epoch == first, "it went on, and was left alone"
        cluster.ready.discard("decode-0")
        began = time.monotonic()
        await cluster.until(lambda: child.epoch != first)
        assert time.monotonic() - began >= 2.5, "only one that stays away for so long is ended"
        cluster.ready.add("decode-0")
        await cluster.until(lambda: "decode-0 is ready again" in cluster.output)
        cluster.supervisor.stop()

    assert cluster.play(story) == 0
