"""Many peers, and for long: nothing mixes, nothing grows."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

from quiesce.transfer.conformance.bench import ALL, PAGES, Bench, often, require
from quiesce.transfer.conformance.party import open_files, size

TRANSFERS, BATCH = 10_000, 250
ROUNDS = 4  # of so many transfers: a pool grows by steps, and there is a round without one; a leak grows in all
MAY_GROW_KIB = 4096 / TRANSFERS  # by one transfer; a leak of one post each would be more


def peers_do_not_mix(bench: Bench) -> None:
    lenders = [bench.near() for _ in range(often(5, 3))]
    posters = [bench.far() for _ in range(2)]
    for number, poster in enumerate(posters):
        poster.fill(40 * number)
    work = []
    for index, lender in enumerate(lenders):
        for number, poster in enumerate(posters):
            peer = bench.attach(poster, lender)
            pages = ALL[number::2]
            source = [(page + index) % PAGES for page in pages]
            post = poster.write(peer, source, pages, lender.grant(poster.epoch, pages))
            work.append((number, index, pages, source, post))
    for number, _, _, _, post in work:
        require(posters[number].outcome(post) == "PLACED", f"post {post} was not placed")
    for number, index, pages, source, _ in work:
        for a, b in zip(source, pages, strict=True):
            require(lenders[index].holds(b, (40 * number + a) % 251), f"page {b} of lender {index} is wrong")


def reconnecting_leaks_nothing(bench: Bench, times: int = 50) -> None:
    times = often(times, 10)
    lender, poster = bench.near(), bench.far()
    descriptor = lender.transport.descriptor(poster.epoch).hex()
    seen: list[int] = []
    files: tuple[int, list[int]] = (0, [])
    for turn in range(times):
        peer = bench.attach(poster, lender)
        generation = lender.transport.generation(poster.epoch) or 0
        require(not seen or generation > seen[-1], f"generation {generation} after {seen[-1:]}")
        seen.append(generation)
        require(poster.connect(descriptor) == peer, "the same descriptor gave another connection")
        if turn == 4:
            files = (open_files(os.getpid()), poster.files())
        poster.disconnect(peer)
        bench.until(lambda: lender.transport.generation(poster.epoch) is None, "the peer to detach")

    def as_before() -> bool:
        now = (open_files(os.getpid()), poster.files())
        return now[0] <= files[0] and all(a <= b for a, b in zip(now[1], files[1], strict=True))

    bench.until(as_before, f"open files of (lender, [poster, its helpers]) to be {files} again")


def ten_thousand_transfers_grow_nothing(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)

    def move(transfers: int) -> None:
        for first in range(0, transfers, BATCH):
            work: list[list[Any]] = []
            for number in range(first, first + BATCH):
                pages = [(number * 3 + offset) % PAGES for offset in range(1 + number % 3)]
                work.append([pages, lender.grant(poster.epoch, pages)])
            ends = poster.burst(peer, work)
            require(ends == {"PLACED": BATCH}, f"of {BATCH} transfers: {ends}")
            for _, (_, generation, _) in work:
                lender.transport.withdraw(poster.epoch, generation)

    def sizes() -> dict[str, dict[str, int]]:
        return {"lender": size(os.getpid(), without=poster.pid), "poster": poster.size()}

    transfers = often(TRANSFERS, 2 * BATCH)
    move(8 * BATCH)  # what is allocated once, at any scale
    seen, growing = [sizes()], {"lender", "poster"}
    while growing and len(seen) <= ROUNDS:
        move(transfers)
        seen.append(sizes())
        for side, was in seen[0].items():
            now = seen[-1][side]
            require(
                now["threads"] <= was["threads"], f"threads of the {side}: {was['threads']}, then {now['threads']}"
            )
            require(now["files"] <= was["files"], f"open files of the {side}: {was['files']}, then {now['files']}")
        growing = {side for side in growing if grown(seen, side)[-1] > MAY_GROW_KIB * transfers}
    grew = ", ".join(f"memory of the {side} grew by {grown(seen, side)} KiB" for side in sorted(growing))
    require(not growing, f"{grew} in {ROUNDS} rounds of {transfers} transfers")


def grown(seen: list[dict[str, dict[str, int]]], side: str) -> list[int]:
    """KiB, in each round."""
    return [b[side]["kib"] - a[side]["kib"] for a, b in pairwise(seen)]
