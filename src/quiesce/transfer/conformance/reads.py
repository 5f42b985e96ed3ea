"""Pull: reads bring what the source holds, refused ones bring nothing, and a fence of one's own reads is final."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from quiesce.core.messages import Grant
from quiesce.transfer.conformance.bench import ALL, PAGES, SENTINEL, Bench, Far, Near, often, require
from quiesce.transfer.conformance.deaths import all_ended, proven, works
from quiesce.transfer.conformance.writes import SHAPES
from quiesce.transfer.interface import Peer


class Reading:
    """A near reader, whose pages can be looked at, and a far source whose page i is all bytes 1 + i."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.reader, self.source = bench.near(), bench.far()
        bench.claims(self.reader, "to pull", lambda caps: caps.pull)
        self.source.fill(1)
        self.peer = self.connect(self.source)

    def connect(self, source: Far) -> Peer:
        transport = self.reader.transport
        peer = transport.connect(bytes.fromhex(source.descriptor(self.reader.epoch)), self.reader.epoch)
        self.bench.until(lambda: source.generation(self.reader.epoch), "the reader to attach")
        return peer

    def lend(self, pages: list[int] = ALL) -> Grant:
        generation = self.bench.until(lambda: self.source.lend(self.reader.epoch, pages, "read"), "a grant")
        return Grant(0, generation, tuple(pages))

    def read(self, own: list[int], theirs: list[int], grant: Grant) -> int:
        return self.reader.transport.read(self.peer, own, theirs, grant).id

    def outcome(self, post: int) -> str:
        return str(self.bench.until(lambda: self.reader.ended.get(post), f"the outcome of read {post}"))


def reads_of_every_shape(bench: Bench) -> None:
    this = Reading(bench)
    draw = random.Random(9)
    shapes = dict(SHAPES)
    for number in range(4):
        count = draw.randint(1, PAGES)
        shapes[f"scattered {number}"] = (draw.choices(ALL, k=count), draw.sample(ALL, count))
    for name, (theirs, own) in shapes.items():
        this.reader.wipe()
        grant = this.lend(sorted({*theirs}))
        require(this.outcome(this.read(own, theirs, grant)) == "PLACED", f"{name}: not placed")
        this.reader.transport.consume_barrier(own)
        wrong = [b for a, b in zip(theirs, own, strict=True) if not this.reader.holds(b, (1 + a) % 251)]
        require(not wrong, f"{name}: {len(wrong)} of {len(own)} pages hold something else")
        others = set(ALL) - set(own)
        require(all(this.reader.holds(page, SENTINEL) for page in others), f"{name}: another page was touched")
        this.source.withdraw(this.reader.epoch, grant.generation)
    require(this.reader.transport.drain(this.peer), "not drained although every read has ended")


def wrong_reads_are_refused(bench: Bench) -> None:
    this = Reading(bench)
    this.reader.wipe()
    grant = this.lend()
    generation = grant.generation
    wrong: list[tuple[str, list[int], list[int], Grant]] = [
        ("own page beyond the pool", [PAGES], [0], grant),
        ("own page below the pool", [-1], [0], grant),
        ("page beyond the source", [0], [PAGES], Grant(0, generation, (PAGES,))),
        ("page that is not in the grant", [0], [5], Grant(0, generation, (4,))),
        ("more own pages than the source's", [0, 1], [0], grant),
        ("an older generation", [0], [0], Grant(0, generation - 1, (0,))),
        ("a newer generation", [0], [0], Grant(0, generation + 1000, (0,))),
    ]
    for what, own, theirs, under in wrong:
        seen = this.outcome(this.read(own, theirs, under))
        require(seen == "FAILED_CLEAN", f"{what}: {seen} instead of FAILED_CLEAN")
    require(this.reader.untouched(), "a refused read has brought something")
    require(this.outcome(this.read([1], [2], grant)) == "PLACED", "nothing is read any more after refusals")
    if this.reader.transport.caps.fence == "page":
        this.source.withdraw(this.reader.epoch, generation)
        this.reader.wipe()
        seen = this.outcome(this.read([1], [2], grant))
        require(
            seen == "FAILED_CLEAN" and this.reader.untouched(), f"a grant that was withdrawn is still read: {seen}"
        )


def a_fence_of_own_reads_is_final(bench: Bench, times: int = 5) -> None:
    """The reader gives up: once it has its proof, nothing that it has asked for lands in its pages."""
    this = Reading(bench)
    bench.claims(this.reader, "a fence", lambda caps: caps.fence != "none")
    for _ in range(often(times)):
        this.reader.wipe()
        grant = this.lend()
        posts = [this.read(ALL, ALL, grant) for _ in range(8)]
        bench.until(lambda: not this.reader.holds(0, SENTINEL), "the first read to land")
        proven(bench, this.reader, this.source.epoch, grant.generation)
        bench.watch_for_late(this.reader, "fence of own reads")
        for post in posts:
            this.outcome(post)
        bench.watch_for_late(this.reader, "fenced reads have ended")
        this.peer = this.connect(this.source)
    require(this.outcome(this.read([1], [2], this.lend())) == "PLACED", "no read after the fence")
    require(this.reader.holds(1, 3), "the page read after the fence is not there")


def a_source_can_revoke_reads(bench: Bench) -> None:
    """A grant that the source has fenced is not read from any more, and what is reported then is not PLACED."""
    source, reader = bench.near(), bench.far()
    bench.claims(source, "to pull", lambda caps: caps.pull)
    bench.claims(source, "a fence of its readers", lambda caps: caps.fence != "none" and caps.fences_readers)
    peer = bench.attach(reader, source)
    source.arena.pages[:] = 1
    _, generation, _ = grant = source.grant(reader.epoch, access="read")
    reader.read_storm(peer, ALL, grant)
    bench.until(lambda: reader.storm_ends()["PLACED"] >= 3, "reads")
    proven(bench, source, reader.epoch, generation)
    bench.until(lambda: reader.storm_ends()["FAILED_CLEAN"] + reader.storm_ends()["UNKNOWN"], "a read to fail")
    all_ended(bench, reader)
    before = reader.storm_ends()["PLACED"]
    post = reader.read(peer, [0], [0], grant)
    require(reader.outcome(post) != "PLACED", f"read under a fenced grant, after {before} before it")


def death_of_the_source_ends_reads(bench: Bench) -> None:
    this = Reading(bench)
    grant = this.lend()
    posts = [this.read(ALL, ALL, grant) for _ in range(40)]
    this.outcome(posts[0])
    this.source.kill()
    bench.until(partial(this.reader.news_of, this.source.epoch), "news of the source's death")
    ends = {this.outcome(post) for post in posts}
    if "UNKNOWN" not in ends:
        bench.watch_for_late(this.reader, f"reads from a dead source ended: {sorted(ends)}")
    other = bench.far()
    other.fill(7)
    this.peer, this.source = this.connect(other), other
    require(this.outcome(this.read([1], [2], this.lend())) == "PLACED", "no read from another source afterwards")


def death_of_the_reader_is_shown(bench: Bench) -> None:
    source, reader, other = bench.near(), bench.far(), bench.far()
    bench.claims(source, "to pull", lambda caps: caps.pull)
    peer = bench.attach(reader, source)
    grant: list[Any] = source.grant(reader.epoch, access="read")
    reader.read_storm(peer, ALL, grant)
    bench.until(lambda: reader.storm_ends()["PLACED"], "reads")
    reader.kill()
    bench.until(partial(source.news_of, reader.epoch), "news of the reader's death")
    other.fill(1)
    writing: Near = source
    peer = bench.attach(other, writing)
    works(bench, writing, other, peer, "for another peer afterwards")
