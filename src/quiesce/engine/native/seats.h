// Answers that are computed a token at a time, as quiesce/engine/seats.py keeps them from step to step.
#pragma once
#include "sampling.h"

extern "C" {

// New tokens of one sequence: `count` from position `start` on, whose pages begin at pages[table].
struct Row {
    int64_t count, start, table;
};

// Each array has a place for every seat; the first `count` are taken. As in library.py.
struct Seats {
    int64_t count, page_size;
    const int64_t *tokens;
    const Row *rows;
    const int64_t *held;  // pages
    const uint64_t *seeds;
    Wish *wishes;
    const int32_t *pages;  // all tables, at rows[seat].table
};

// What tokens, positions and pages must be below.
struct Bounds {
    int64_t vocab, context, pages;
};
}

namespace {

// Which pages a step writes.
class Marks {
    std::vector<uint8_t> taken;  // by page; all 0 between two calls
    std::vector<int64_t> written;

    bool take(int64_t page) {
        if (taken[page]) return false;
        taken[page] = 1;
        written.push_back(page);
        return true;
    }

    bool take(const Seats &seats, const Bounds &bounds, int64_t at) {
        const int64_t start = seats.rows[at].start, place = start / seats.page_size;
        if (start < 0 || start >= bounds.context || place >= seats.held[at]) return false;
        if (seats.tokens[at] < 0 || seats.tokens[at] >= bounds.vocab) return false;
        return take(seats.pages[seats.rows[at].table + place]);
    }

  public:
    // The pages of all tables and of `others` are within bounds.
    bool sound(const Seats &seats, const Bounds &bounds, const int64_t *others, int64_t other_count) {
        if ((int64_t)taken.size() < bounds.pages) taken.resize(bounds.pages);
        written.clear();
        written.reserve(seats.count + other_count);
        bool fine = true;
        for (int64_t at = 0; fine && at < seats.count; at++) fine = take(seats, bounds, at);
        for (int64_t at = 0; fine && at < other_count; at++) fine = take(others[at]);
        for (int64_t page : written) taken[page] = 0;
        return fine;
    }
};

}  // namespace
