"""Fences, deaths, stops and restarts under fire: what may land afterwards, and what must go on working."""

from __future__ import annotations

from functools import partial
from typing import Any

from quiesce.transfer.conformance.bench import ALL, PAGES, SENTINEL, Bench, Far, Near, often, require
from quiesce.transfer.interface import FenceProof


def proven(
    bench: Bench, lender: Near, epoch: int, generation: int, pages: frozenset[int] | None = None
) -> FenceProof:
    fence = partial(lender.transport.fence, epoch, generation, pages)
    proof: FenceProof = bench.until(fence, "a proof of the fence")
    covers = proof.peer_epoch == epoch and generation <= proof.generation
    wide = proof.pages is None or (pages is not None and pages <= proof.pages)
    require(covers and wide and proof.kind == "fenced", f"a proof of something else: {proof}")
    return proof


def all_ended(bench: Bench, poster: Far) -> dict[str, Any]:
    poster.calm()
    bench.until(lambda: not poster.storm_ends()["open"], "every post to end")
    ends: dict[str, Any] = poster.storm_ends()
    return ends


def works(bench: Bench, lender: Near, poster: Far, peer: int, why: str) -> None:
    post = poster.write(peer, [3], [4], lender.grant(poster.epoch))
    seen = poster.outcome(post)
    require(seen == "PLACED", f"no work {why}: {seen}")
    require(lender.holds(4, 4), f"the page written {why} is not there")


# ---------------------------------------------------------------- fences


def fence_is_final(bench: Bench, times: int = 10) -> None:
    """Fence under fire: the poster goes on posting under the old grant before, during and after."""
    lender, poster = bench.near(), bench.far()
    bench.claims(lender, "a fence", lambda caps: caps.fence != "none")
    peer = bench.attach(poster, lender)
    poster.fill(1)
    for _ in range(often(times)):
        _, generation, _ = bench.storm(lender, poster, peer)
        proof = proven(bench, lender, poster.epoch, generation)
        bench.watch_for_late(lender, "fence")
        newer = bench.until(lambda: lender.transport.lend(poster.epoch, ALL), "the peer to attach again")
        require(newer > proof.generation, f"generation {newer} was fenced already: {proof}")
        bench.watch_for_late(lender, "posts under the fenced grant after the peer attached again")
        again = lender.transport.fence(poster.epoch, generation)
        require(again is not None, "the same fence, asked for again, is not proven any more")
        require(lender.transport.generation(poster.epoch) == newer, "a fence of an old generation hit the new one")
    ends = all_ended(bench, poster)
    clean = not (lender.transport.caps.failure_is_terminal and ends["UNKNOWN"])
    require(clean and ends["PLACED"] < sum(ends.values()), f"fenced posts did not end FAILED_CLEAN: {ends}")
    works(bench, lender, poster, peer, "under the new generation")


def fence_of_pages_disturbs_no_others(bench: Bench, times: int = 10) -> None:
    lender, poster = bench.near(), bench.far()
    bench.claims(lender, "a fence of pages", lambda caps: caps.fence == "page")
    peer = bench.attach(poster, lender)
    poster.fill(1)
    for _ in range(often(times)):
        lender.wipe()
        kept = lender.grant(poster.epoch, ALL[:128])
        _, generation, _ = fenced = lender.grant(poster.epoch, ALL[128:])
        posts = poster.writes(peer, 20, ALL[:128], kept)
        doomed = poster.writes(peer, 20, ALL[128:], fenced)
        bench.until(lambda: not lender.holds(0, SENTINEL), "the first write to land")
        proven(bench, lender, poster.epoch, generation, frozenset(ALL[128:]))
        lender.arena.pages[128:] = SENTINEL
        seen = {poster.outcome(post) for post in posts}
        require(seen == {"PLACED"}, f"a fence of other pages has disturbed writes: {seen}")
        require({poster.outcome(post) for post in doomed} <= {"PLACED", "FAILED_CLEAN"}, "a fenced post is unknown")
        require((lender.arena.pages[128:] == SENTINEL).all(), "pages changed after the proof of their fence")
        lender.transport.withdraw(poster.epoch, kept[1])


# ---------------------------------------------------------------- the poster


def death_of_the_poster_is_shown(bench: Bench, times: int = 3) -> None:
    lender = bench.near()
    for _ in range(often(times)):
        poster = bench.far()
        peer = bench.attach(poster, lender)
        poster.fill(1)
        _, generation, _ = bench.storm(lender, poster, peer)
        require(lender.transport.gone(poster.epoch) is None, "called dead while it writes")
        poster.kill()
        told = bench.until(partial(lender.news_of, poster.epoch), "news of the death")
        require(told[0].generation == generation, f"news of another generation: {told}")
        if lender.transport.caps.fence == "death":
            proof = bench.until(partial(lender.transport.gone, poster.epoch), "a proof of the death")
            covers = proof.peer_epoch == poster.epoch and generation <= proof.generation
            require(covers and proof.kind == "gone", f"a proof of something else: {proof}")
        elif lender.transport.caps.fence != "none":
            proven(bench, lender, poster.epoch, generation)
        else:
            continue
        bench.watch_for_late(lender, "death of the poster")
        require(lender.transport.generation(poster.epoch) is None, "a dead peer is still attached")


def a_stopped_poster_is_fenced(bench: Bench) -> None:
    """It cannot be asked for anything, and goes on when it wakes up."""
    lender, poster = bench.near(), bench.far()
    bench.claims(lender, "a fence", lambda caps: caps.fence != "none")
    peer = bench.attach(poster, lender)
    poster.fill(1)
    _, generation, _ = bench.storm(lender, poster, peer)
    poster.stop()
    proven(bench, lender, poster.epoch, generation)
    bench.watch_for_late(lender, "fence of a stopped poster")
    poster.go_on()
    bench.watch_for_late(lender, "a stopped poster goes on after it was fenced")
    all_ended(bench, poster)
    bench.until(lambda: lender.transport.lend(poster.epoch, ALL), "the peer to be attached")
    works(bench, lender, poster, peer, "after the stop")


def a_restarted_poster_is_another(bench: Bench) -> None:
    """What is proven of the old epoch leaves the new one alone, and the other way round."""
    lender, old, bystander = bench.near(), bench.far(), bench.far()
    peer, by = bench.attach(old, lender), bench.attach(bystander, lender)
    for each in (old, bystander):
        each.fill(1)
    _, generation, _ = bench.storm(lender, old, peer)
    old.kill()
    new = bench.far()
    new.fill(1)
    peer = bench.attach(new, lender)
    bench.until(partial(lender.news_of, old.epoch), "news of the death")
    require(not lender.news_of(bystander.epoch), "the death of one poster is told of another")
    if lender.transport.caps.fence not in ("none", "death"):
        proven(bench, lender, old.epoch, generation)
    elif lender.transport.caps.fence == "death":
        bench.until(partial(lender.transport.gone, old.epoch), "a proof of the death")
    require(lender.transport.gone(new.epoch) is None, "the new epoch is called dead")
    works(bench, lender, new, peer, "of the new epoch")
    works(bench, lender, bystander, by, "of a poster that has nothing to do with it")


# ---------------------------------------------------------------- the lender


def death_of_the_lender_ends_posts(bench: Bench) -> None:
    mortal, poster, other = bench.far(), bench.far(), bench.near()
    poster.fill(1)
    peer = poster.connect(mortal.descriptor(poster.epoch))
    generation = bench.until(lambda: mortal.lend(poster.epoch, ALL), "the peer to attach")
    poster.storm(peer, ALL, [0, generation, ALL])
    bench.until(lambda: poster.storm_ends()["PLACED"], "writes to land")
    mortal.kill()
    bench.until(lambda: mortal.epoch in poster.lost(), "news of the lender's death")
    all_ended(bench, poster)
    post = poster.write(peer, [0], [0], [0, generation, ALL])
    require(poster.outcome(post) != "PLACED", "placed in the memory of a dead lender")
    reborn = bench.far()  # as it is restarted: another epoch, another address
    peer = poster.connect(reborn.descriptor(poster.epoch))
    generation = bench.until(lambda: reborn.lend(poster.epoch, [2]), "the peer to attach to the restarted lender")
    require(poster.outcome(poster.write(peer, [9], [2], [0, generation, [2]])) == "PLACED", "no work after a restart")
    peer = bench.attach(poster, other)
    post = poster.write(peer, [9], [2], other.grant(poster.epoch))
    require(poster.outcome(post) == "PLACED", "no work for another lender afterwards")
    require(other.holds(2, 10), "the page written for the other lender is not there")


def a_stopped_lender_fails_nothing(bench: Bench) -> None:
    """No timeout of the engine's fires: posts wait, or land, and end PLACED once it goes on."""
    stopped, poster = bench.far(), bench.far()
    poster.fill(1)
    peer = poster.connect(stopped.descriptor(poster.epoch))
    generation = bench.until(lambda: stopped.lend(poster.epoch, ALL), "the peer to attach")
    poster.storm(peer, ALL, [0, generation, ALL])
    bench.until(lambda: poster.storm_ends()["PLACED"], "writes to land")
    stopped.stop()
    poster.calm()
    for _ in range(20):
        bench.watch_nothing(0.05)
        ends = poster.storm_ends()
        require(not (ends["UNKNOWN"] or ends["FAILED_CLEAN"]), f"posts to a stopped lender fail: {ends}")
    stopped.go_on()
    ends = all_ended(bench, poster)
    require(not (ends["UNKNOWN"] or ends["FAILED_CLEAN"]), f"posts fail when the lender goes on: {ends}")


# ---------------------------------------------------------------- ends that race


def posts_race_close(bench: Bench) -> None:
    """Each post is told of once, whoever closes; a lender that has its proof sees nothing more."""
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)
    _, generation, _ = bench.storm(lender, poster, peer)
    poster.close()  # the party counts the outcomes
    bench.until(partial(lender.news_of, poster.epoch), "news of the end")
    if lender.transport.caps.fence not in ("none", "death"):
        proven(bench, lender, poster.epoch, generation)
        bench.watch_for_late(lender, "the poster closed its transport")
    closing, survivor = bench.near(), bench.far()
    survivor.fill(1)
    peer = bench.attach(survivor, closing)
    bench.storm(closing, survivor, peer)
    bench.leave(closing)
    bench.until(lambda: closing.epoch in survivor.lost(), "news that the lender has closed")
    all_ended(bench, survivor)
    peer = bench.attach(survivor, lender)
    works(bench, lender, survivor, peer, "after a lender has closed")


def no_failure_lands_late(bench: Bench, times: int = 5) -> None:
    """After every kind of non-success: what the poster calls FAILED_CLEAN, or drained, touches nothing any more."""
    lender, poster = bench.near(), bench.far()
    poster.fill(1)
    for turn in range(often(times, 3)):
        peer = bench.attach(poster, lender)
        lender.wipe()
        _, generation, _ = grant = lender.grant(poster.epoch)
        posts = poster.writes(peer, 30, ALL, grant)
        bench.until(lambda: not lender.holds(PAGES - 1, SENTINEL), "the first write to land")
        match turn % 3:
            case 0:
                poster.disconnect(peer)
            case 1 if lender.transport.caps.fence != "none":
                proven(bench, lender, poster.epoch, generation)
            case _:
                for post in reversed(posts):
                    if poster.cancel(post):
                        poster.seen[post] = "cancelled"
                poster.write(peer, [0], [PAGES], [0, generation, [PAGES]])
        bench.until(partial(_heard, poster, posts), "every post to end")
        if not any(poster.seen[post] == "UNKNOWN" for post in posts):
            bench.watch_for_late(lender, f"all posts ended: {sorted({poster.seen[post] for post in posts})}")
        if turn % 3:
            poster.disconnect(peer)
        bench.until(lambda: lender.transport.generation(poster.epoch) is None, "the peer to detach")


def _heard(poster: Far, posts: list[int]) -> bool:
    poster.seen.update(poster.outcomes())
    return all(post in poster.seen for post in posts)
