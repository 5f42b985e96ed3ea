"""Sockets, descriptors and processes: what is left behind, and what dies with whom."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from quiesce.transfer.arena import shared_arena
from quiesce.transfer.conformance import Bench
from quiesce.transfer.interface import Arena, Outcome
from quiesce.transfer.shm import ShmTransport
from quiesce.transfer.watch import has_exited

from .conftest import ALL, PAGE_BYTES, Pair


def sockets(run_dir: Path) -> list[Path]:
    return list(run_dir.glob("*.sock"))


def test_the_socket_is_private_and_unlinked(pair: Pair) -> None:
    assert not sockets(pair.run_dir), "a pure poster does not listen"
    pair.lender.transport.descriptor()
    (path,) = sockets(pair.run_dir)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    pair.lender.transport.close_all()
    assert not sockets(pair.run_dir)


def test_a_run_directory_too_deep_for_a_socket_is_named(tmp_path: Path) -> None:
    transport = ShmTransport(tmp_path / ("x" * 120), 1)
    transport.register(shared_arena(2, 64))
    with pytest.raises(ValueError, match="shorter run directory"):
        transport.descriptor()
    transport.close_all()


def test_memory_that_can_shrink_is_refused(tmp_path: Path) -> None:
    fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    transport = ShmTransport(tmp_path, 1)
    with pytest.raises(ValueError, match="shared_arena"):
        transport.register(Arena(shared_arena(1, 4096).pages, fd))
    with pytest.raises(ValueError, match="shared_arena"):
        transport.register(Arena(shared_arena(1, 4096).pages, None))
    os.close(fd)
    transport.close_all()


def test_descriptors_that_do_not_fit_are_refused(pair: Pair) -> None:
    connect = pair.poster.transport.connect
    for wrong in (b"", b"\x00junk", b"\x80"):
        with pytest.raises(ValueError, match="not the descriptor"):
            connect(wrong, pair.poster.epoch)
    other = ShmTransport(pair.run_dir, 5)
    other.register(shared_arena(4, PAGE_BYTES * 2))
    with pytest.raises(ValueError, match=f"pages of {PAGE_BYTES * 2} bytes"):
        connect(other.descriptor(), pair.poster.epoch)
    other.close_all()


def test_a_mover_with_nothing_to_do_sleeps(pair: Pair) -> None:
    """It looks on for a moment after each job."""
    peer = pair.attach()
    for page in range(20):
        assert pair.outcome(pair.poster.transport.write(peer, [page], [page], pair.grant())) is Outcome.PLACED
    state = Path(f"/proc/{pair.poster.mover_pid}/stat")
    pair.until(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "S", "the mover to sleep")


def test_the_mover_cannot_write_what_it_reads_from(pair: Pair) -> None:
    pair.attach()
    maps = Path(f"/proc/{pair.poster.mover_pid}/maps").read_text()
    modes = sorted(line.split()[1] for line in maps.splitlines() if "memfd:quiesce-pages" in line)
    assert modes == ["r--s", "rw-s"], "own pool to read, the lender's to write, nothing else"
    process = Path(f"/proc/{pair.poster.mover_pid}")
    pools = [path.name for path in (process / "fd").iterdir() if "memfd" in os.readlink(path)]
    for name in pools:
        flags = int((process / "fdinfo" / name).read_text().split("flags:")[1].split()[0], 8)
        assert flags & os.O_CLOEXEC, "a pool would be inherited"
    assert pools


def test_the_mover_dies_with_its_engine(tmp_path: Path) -> None:
    bench = Bench("quiesce.transfer.shm:factory", tmp_path)
    lender, poster = bench.near(), bench.far()
    bench.attach(poster, lender)
    (mover,) = poster.helpers()
    pidfd = os.pidfd_open(mover)
    poster.kill()
    bench.until(lambda: lender.transport.gone(poster.epoch), "proof of the mover's death")
    assert has_exited(pidfd)
    os.close(pidfd)
    bench.close()


def test_closing_ends_every_post_and_the_mover(pair: Pair) -> None:
    peer = pair.attach()
    grant, mover = pair.grant(), pair.poster.mover_pid
    posts = [pair.poster.transport.write(peer, ALL, ALL, grant) for _ in range(30)]
    pair.poster.transport.close_all()
    ended = dict(pair.poster.transport.poll())
    assert set(ended) == set(posts)
    assert set(ended.values()) <= {Outcome.PLACED, Outcome.FAILED_CLEAN}
    assert not Path(f"/proc/{mover}").exists()
    pair.sides.remove(pair.poster)
    pair.until(lambda: pair.lender.transport.gone(pair.poster.epoch), "proof of the mover's death")


def test_a_mover_starts_without_what_it_does_not_need(pair: Pair) -> None:
    """Seconds of imports would be seconds without a way to move pages, after a crash."""
    pair.attach()
    mapped = Path(f"/proc/{pair.poster.mover_pid}/maps").read_text()
    assert "python" in mapped
    assert not [name for name in ("torch", "transformers", "zmq", "tokenizers") if f"/{name}/" in mapped]
