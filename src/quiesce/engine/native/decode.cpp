// Steps of those who sit, one after the other, by calls of a level's library: Python has no part in them, so nobody
// waits for its lock. quiesce/engine/native/decode_loop.py mirrors the structures below.
#include <cerrno>
#include <unistd.h>
#include "seats.h"

extern "C" {

// Of step.cpp, at the level that the engine runs.
struct Calls {
    int32_t (*sound)(const Seats *, const Bounds *, const int64_t *, int64_t);
    int32_t (*forward)(void *, const int32_t *, const Row *, int64_t, const int64_t *, const int32_t *, void *, float *);
    int32_t (*logits)(void *, const float *, int64_t, float *, int64_t, float *, Best *);
    int32_t (*draw)(const Seats *, const float *, const float *, const Best *, int64_t, int64_t *);
};

// What a step reads, and where it leaves what it makes: a place each for at least as many as sit.
struct Desk {
    Calls calls;
    void *stepper, *pool;
    const Seats *seats;
    Bounds bounds;
    int32_t *tokens;
    float *hidden, *logits, *peaks;
    Best *bests;
    int64_t *drawn;
    int64_t wanted;      // 1: a step. 0: something else, which Python does
    int32_t begin, done;  // eventfds: written by who wants something; by us when a step has ended
};
}

namespace {

// Whether everyone has a token.
bool step(const Desk &desk) {
    const Seats &seats = *desk.seats;
    if (!desk.calls.sound(&seats, &desk.bounds, nullptr, 0)) return false;
    for (int64_t at = 0; at < seats.count; at++) desk.tokens[at] = (int32_t)seats.tokens[at];
    if (desk.calls.forward(desk.stepper, desk.tokens, seats.rows, seats.count, nullptr, seats.pages, desk.pool,
                           desk.hidden))
        return false;
    if (desk.calls.logits(desk.stepper, desk.hidden, seats.count, desk.logits, desk.bounds.vocab, desk.peaks,
                          desk.bests))
        return false;
    return !desk.calls.draw(&seats, desk.logits, desk.peaks, desk.bests, desk.bounds.vocab, desk.drawn);
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int64_t quiesce_desk_bytes() { return sizeof(Desk); }

// Until something else is wanted: 0. A step failed, and nobody has been told yet: 1. An eventfd failed: errno, negative.
API int64_t quiesce_decode(const Desk *desk) {
    for (;;) {
        uint64_t count;
        while (read(desk->begin, &count, sizeof count) < 0)
            if (errno != EINTR) return -errno;
        if (!desk->wanted) return 0;
        if (!step(*desk)) return 1;
        count = 1;
        while (write(desk->done, &count, sizeof count) < 0)
            if (errno != EINTR) return -errno;
    }
}
