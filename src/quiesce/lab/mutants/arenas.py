"""The worlds in which mutants show: small, and with every late message kept deliverable."""

from __future__ import annotations

from dataclasses import replace

from quiesce.lab.worlds import World

TWO = World("two", "two requests, one page", pool=1, late=True)
THREE = World("three", "three requests, one page", requests=(1, 1, 1), pool=1, late=True)
CHUNKS = World("chunks", "two requests of two chunks, posted one by one", requests=(2, 2), window=1, late=True)
HALVES = World("halves", "half of a page lands first", requests=(1,), pool=1, halves=True)
WIDE = World("wide", "two requests of two chunks, posted together", requests=(2, 2), window=2, failed=1, late=True)
RANKS = World("ranks", "two prefill ranks, two requests, one page", prefills=2, pool=1, late=True)
RANKS_FAIL = World("ranks fail", "two prefill ranks, one fails", prefills=2, pool=1, fault=1, late=True)
RANKS_FULL = World(
    "ranks full", "two prefill ranks that remember one transfer", (1, 1, 1), prefills=2, pool=1, records=1, late=True
)
RANKS_FENCE = World(
    "ranks fence", "two prefill ranks, an UNKNOWN post, a fence", prefills=2, pool=1, unknown=1, fence=True, late=True
)
FAULT = World("fault", "a prefill failure", pool=1, fault=1, late=True)
TAINT = World("taint", "an UNKNOWN post", pool=1, unknown=1, late=True)
FENCE = World("fence", "an UNKNOWN post and a fence", pool=1, unknown=1, fence=True, late=True)
FENCE_TWICE = World("fence twice", "a fence whose report comes late", (1, 1, 1), pool=1, fence=True, suspect=2)
FENCE_CHUNKS = World("fence chunks", "a fence between two chunks", (2, 1), window=1, fence=True, suspect=1)
FENCE_SHARED = World("fence shared", "a fence hits a good transfer too", (1, 1), pool=2, fence=True)
CRASH = World("crash", "the prefill engine restarts", pool=1, crash_p=1, gone=True, late=True)
CRASH_FENCE = World("crash fence", "the prefill engine restarts; it can be fenced", pool=1, crash_p=1, fence=True)
CRASH_D = World("crash decode", "the decode engine restarts", pool=1, crash_d=1, late=True)
PINGS = World("pings", "closed sets", pool=1, pings=1, late=True)
SOURCES = World("sources", "one source page", sources=1, unknown=1, fault=1, late=True)
DIGEST = World("digest", "a foreign writer, found by a digest", pool=1, digest=True, stray=1, fence=True, suspect=1)
DIGEST_LATE = replace(DIGEST, name="digest late", requests=(1, 1, 1))
SHORT = World("short", "a prefill engine that plans fewer pages", requests=(2,), short=1)
MISPAIRED = World("mispaired", "a room whose two legs are about different prompts", (1,), pool=1, mispaired=1)
PAIR = World("pair", "two requests at once", requests=(1, 1), pool=2, late=True)

LIVE = World("live", "one request", requests=(1,), pool=1, live=True)
LIVE_FAULT = World("live fault", "one request, a failure", requests=(1,), pool=1, fault=1, live=True)
LIVE_FENCE = World(
    "live fence", "an UNKNOWN post, a fence refused once", (1,), pool=1, unknown=1, fence=True, unfenced=1
)
LIVE_DRAIN = World("live drain", "an UNKNOWN post and a drain", (1,), pool=1, unknown=1, drain=True, live=True)
LIVE_RANKS = World("live ranks", "two prefill ranks, a failure", (1,), pool=1, prefills=2, fault=1, live=True)
LIVE_DECODES = World("live decodes", "two decode ranks", requests=(1,), pool=1, decodes=2, live=True)
HANDSHAKE = World("handshake", "a decode engine that restarts", pings=2, crash_d=1, handshake=True)
NARROW = World("narrow", "a fence of one page of two", (2, 2), window=1, fence=True, narrow=True)

PULL = World("pull", "pull: two requests, one source page", pool=2, sources=1, late=True, pull=True)
PULL_TAINT = replace(PULL, name="pull taint", about="pull: one page each, an UNKNOWN read", pool=1, unknown=1)
PULL_CRASH = World("pull crash", "pull: prefill restarts", sources=1, pool=1, crash_p=1, successor=True, pull=True)
PULL_CHUNKS = World("pull chunks", "pull: prefill restarts between reads", (2,), crash_p=1, successor=True, pull=True)
PULL_PINGS = replace(PULL, name="pull pings", about="pull: closed sets", pings=1)
PULL_FENCE = World("pull fence", "pull: a fence before a read", sources=1, fence=True, suspect=1, pull=True)
PULL_RESTART = World("pull restart", "pull: the decode engine restarts", pool=1, crash_d=1, late=True, pull=True)
PULL_LIVE = World("pull live", "pull: an UNKNOWN read, a fence", (1,), sources=1, unknown=1, fence=True, pull=True)

LED = World(
    "led", "two decode ranks under one leader, two requests, one page", pool=1, decodes=2, late=True, led=True
)
LED_ALONE = World("led alone", "one of two decode ranks suspects", (1,), pool=1, decodes=2, suspect=1, led=True)
LED_DIGEST = World(
    "led digest", "a foreign writer at one of two ranks", (1,), pool=1, decodes=2, digest=True, stray=1, led=True
)
