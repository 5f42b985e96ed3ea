"""Writes that succeed, and those that must be refused with nothing touched."""

from __future__ import annotations

import random
from typing import Any

from quiesce.transfer.conformance.bench import ALL, PAGES, SENTINEL, Bench, require

SHAPES: dict[str, tuple[list[int], list[int]]] = {  # own pages, the lender's
    "one page": ([7], [200]),
    "the first": ([0], [0]),
    "the last": ([PAGES - 1], [PAGES - 1]),
    "all in order": (ALL, ALL),
    "backwards": (ALL[::-1], ALL),
    "into backwards": (ALL, ALL[::-1]),
    "every other": (ALL[::2], ALL[1::2]),
    "in runs": ([*range(3, 40), *range(90, 131), 250], [*range(100, 137), *range(10, 51), 0]),
    "one page many times": ([5] * 150, ALL[50:200]),
    "a job to the page": (ALL[:100], ALL[100:200]),
    "a job and a page": (ALL[:101], ALL[100:201]),
    "two jobs less a page": (ALL[:199], ALL[57:256]),
}


def placed_means_visible(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)
    source = ALL[::-1]
    post = poster.write(peer, source, ALL, lender.grant(poster.epoch))
    require(poster.outcome(post) == "PLACED", "a plain write was not placed")
    lender.transport.consume_barrier(ALL)
    wrong = [b for a, b in zip(source, ALL, strict=True) if not lender.holds(b, (1 + a) % 251)]
    require(not wrong, f"{len(wrong)} pages were not visible when the post was PLACED")
    require(poster.drained(peer), "not drained although every post has ended")


def page_lists_of_every_shape(bench: Bench) -> None:
    """What is listed lands where it is listed, and no other page is touched."""
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)
    draw = random.Random(8)
    shapes = dict(SHAPES)
    for number in range(6):
        count = draw.randint(1, PAGES)
        shapes[f"scattered {number}"] = (draw.choices(ALL, k=count), draw.sample(ALL, count))
    for name, (source, target) in shapes.items():
        lender.wipe()
        post = poster.write(peer, source, target, lender.grant(poster.epoch, sorted(target)))
        require(poster.outcome(post) == "PLACED", f"{name}: not placed")
        lender.transport.consume_barrier(target)
        wrong = [b for a, b in zip(source, target, strict=True) if not lender.holds(b, (1 + a) % 251)]
        require(not wrong, f"{name}: {len(wrong)} of {len(target)} pages hold something else")
        others = set(ALL) - set(target)
        require(
            all(lender.holds(page, SENTINEL) for page in others), f"{name}: a page that was not listed was touched"
        )
    post = poster.write(peer, [], [], lender.grant(poster.epoch))
    require(poster.outcome(post) == "PLACED", "an empty list is not placed at once")


def posts_are_ordered(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(0)
    grant = lender.grant(poster.epoch)
    posts = [poster.write(peer, [i], [7], grant) for i in range(60)]
    seen: list[list[Any]] = []

    def all_ended() -> bool:
        seen.extend(poster.outcomes())
        return len(seen) == len(posts)

    bench.until(all_ended, "60 posts to end")
    require([post for post, _ in seen] == posts, "posts to one peer ended out of order")
    require({outcome for _, outcome in seen} == {"PLACED"}, f"not all were placed: {seen}")
    require(lender.holds(7, 59), "a later post was overtaken by an earlier one")


def cancelled_posts_never_land(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    bench.claims(lender, "to cancel what is queued", lambda caps: caps.cancels_queued)
    peer = bench.attach(poster, lender)
    poster.fill(1)
    lender.wipe()
    posts = poster.writes(peer, 100, ALL[:200], lender.grant(poster.epoch))
    last = poster.write(peer, [1], [PAGES - 1], lender.grant(poster.epoch, [PAGES - 1]))
    cancelled = [post for post in [last, *reversed(posts)] if poster.cancel(post)]
    bench.until(lambda: poster.drained(peer), "the rest to end")

    def heard() -> bool:
        poster.seen.update(poster.outcomes())
        return len({*poster.seen, *cancelled}) == len(posts) + 1

    bench.until(heard, "the ends of the rest")
    told = [post for post in cancelled if post in poster.seen]
    require(not told, f"{len(told)} posts were cancelled with proof and told of all the same")
    require({*poster.seen.values()} <= {"PLACED"}, f"posts that were not cancelled failed: {poster.seen}")
    landed = not lender.holds(PAGES - 1, SENTINEL)
    require(landed == (last not in cancelled), "the last post was cancelled with proof and has landed")
    bench.watch_for_late(lender, "every post has ended or was cancelled")


# ---------------------------------------------------------------- refusal


def outside_is_refused(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)
    lender.wipe()
    region, generation, _ = lender.grant(poster.epoch)
    outside = [
        ("target beyond the pool", [0, 1], [0, PAGES], [0, PAGES]),
        ("target far beyond the pool", [0], [2**31 - 1], [2**31 - 1]),
        ("target beyond any pool", [0], [2**63], [2**63]),
        ("target below the pool", [0, 1], [0, -1], [0, -1]),
        ("source beyond the pool", [0, PAGES], [0, 1], [0, 1]),
        ("source below the pool", [-1], [0], [0]),
        ("target not in the grant", [0, 1], [0, 5], [0, 4]),
        ("more sources than targets", [0, 1], [0], [0]),
        ("more targets than sources", [0], [0, 1], [0, 1]),
    ]
    for what, source, target, granted in outside:
        post = poster.write(peer, source, target, [region, generation, granted])
        seen = poster.outcome(post)
        require(seen == "FAILED_CLEAN", f"{what}: {seen} instead of FAILED_CLEAN")
    require(lender.untouched(), "a refused post has touched pages")
    post = poster.write(peer, [3], [4], [region, generation, [4]])
    require(poster.outcome(post) == "PLACED", "nothing is placed any more after posts were refused")


def wrong_generation_is_refused(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)
    lender.wipe()
    region, generation, pages = lender.grant(poster.epoch)
    for wrong in (generation - 1, generation + 1):
        post = poster.write(peer, ALL, ALL, [region, wrong, pages])
        seen = poster.outcome(post)
        require(seen == "FAILED_CLEAN", f"generation {wrong} for {generation}: {seen}")
    require(lender.untouched(), "a refused post has touched pages")


def what_was_not_lent_is_refused(bench: Bench) -> None:
    """Where the engine checks pages at placement: a grant that a poster has made up, or that has been withdrawn."""
    lender, poster = bench.near(), bench.far()
    bench.claims(lender, "to know what it has lent", lambda caps: caps.fence == "page")
    peer = bench.attach(poster, lender)
    poster.fill(1)
    lender.wipe()
    region, generation, _ = lender.grant(poster.epoch, ALL[:10])
    made_up = [
        ("pages that were not lent", [region, generation, ALL]),
        ("one page too many", [region, generation, ALL[:11]]),
        ("another region", [region + 1, generation, ALL[:10]]),
        ("a transfer that does not exist", [region, generation + 1000, ALL[:10]]),
    ]
    for what, grant in made_up:
        post = poster.write(peer, grant[2], grant[2], grant)
        seen = poster.outcome(post)
        require(seen == "FAILED_CLEAN", f"{what}: {seen}")
    require((lender.arena.pages[10:] == SENTINEL).all(), "a grant that was made up has opened pages")
    post = poster.write(peer, ALL[:10], ALL[:10], [region, generation, ALL[:10]])
    require(poster.outcome(post) == "PLACED", "what was lent is refused as well")
    lender.transport.withdraw(poster.epoch, generation)
    lender.wipe()
    post = poster.write(peer, ALL[:10], ALL[:10], [region, generation, ALL[:10]])
    require(poster.outcome(post) == "FAILED_CLEAN" and lender.untouched(), "a grant that was withdrawn still counts")
    refused = sum(n for name, n in lender.transport.counters().items() if "not_offered" in name or "refused" in name)
    require(refused >= len(made_up) + 1, f"{refused} refusals are counted of {len(made_up) + 1}")
