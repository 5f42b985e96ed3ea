// Draws tokens from logits and their peaks: only blocks are read that have a candidate, or mass that may decide.
#pragma once
#include "peaks.h"
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

extern "C" {

// As in library.py. top_k 0: no bound. `token` is the answer; -1: the row has a NaN or an infinity.
struct Wish {
    double temperature, top_p, min_p, chance;
    int64_t top_k, masked, token;  // masked: -inf is a token that must not be drawn
};
}

namespace {

// As `sampler.uniform`: XXH3 of 16 bytes, the seed and the position, as a number in [0, 1).
inline double uniform(uint64_t seed, uint64_t position) {
    const uint64_t low = seed ^ 0x1f67b3b7a4a44072 ^ 0x78e5c0cc4ee679cb, high = position ^ 0x2172ffcc7dd05a82 ^ 0x8e2443f7744608b8;
    const unsigned __int128 product = (unsigned __int128)low * high;
    uint64_t mixed = 16 + __builtin_bswap64(low) + high + ((uint64_t)product ^ (uint64_t)(product >> 64));
    mixed = (mixed ^ mixed >> 37) * 0x165667919e3779f9;
    mixed ^= mixed >> 32;
    return (double)(mixed >> 11) * 0x1p-53;
}

class Sampler {
    static constexpr long FLUSH = 16;  // blocks whose float sums are added before a double takes them
    static constexpr size_t COMING = 6;  // blocks that memory brings while one is read: it takes note of no more
    static constexpr double MARGINS[] = {4, 8, 16};  // how far below the best candidates reach, in turn, by temperature
    static constexpr double DEPTHS[] = {10, 14, 18};  // and how far blocks are weighed
    static constexpr float LOWEST = std::numeric_limits<float>::lowest();
    static constexpr float ABOVE_ALL = std::numeric_limits<float>::infinity();
    static constexpr int NARROWED = 6;  // halvings of the gap in which the bound of top-k is looked for
    static constexpr double ROUNDED = 1.00001;  // the rest of the mass is not estimated too low

    struct Row {
        const float *x, *peaks;
        float best;
        long token;  // its best, -1: not known
    };

    long n, blocks;
    Row row;
    double mass, rest;               // the sum of exp((x - best) / temperature) in what was weighed; at most, elsewhere
    float weighed;                   // blocks whose peak reaches this are
    std::vector<float> own;          // peaks that did not come with the logits
    std::vector<int32_t> wanted;     // blocks that are being visited
    float high;                      // candidates that reach this have been found
    size_t margins;                  // used up
    std::vector<uint64_t> found;     // candidates, each its rank: value falling, then id rising
    std::vector<double> reach;       // running sum of the candidates' exp, in the order of their ranks
    std::vector<int32_t> ids;

    // As unsigned numbers these rise as their floats fall.
    static uint64_t rank(float value, long id) {
        const uint32_t bits = read<uint32_t>(&(value += 0.0f));  // -0 becomes 0
        const uint32_t rising = bits >> 31 ? ~bits : bits | 1u << 31;
        return (uint64_t)~rising << 32 | (uint64_t)id;
    }
    static float value(uint64_t rank) {
        const uint32_t rising = ~(uint32_t)(rank >> 32), bits = rising >> 31 ? rising & ~(1u << 31) : ~rising;
        return read<float>(&bits);
    }

    // Calls f with every vector of a block and its place; beyond the end of the row there is nothing.
    template <class F> void each(long block, F f) const {
        const long first = block * UNDER;
        if (first + UNDER <= n) {
            for (long i = first; i < first + UNDER; i += W) f(load(row.x + i), i);
            return;
        }
        for (long i = first; i < n; i += W) {
            float rest[W];
            for (int k = 0; k < W; k++) rest[k] = i + k < n ? row.x[i + k] : NOTHING;
            f(load(rest), i);
        }
    }

    // Calls f with every block of low <= peak < below.
    template <class F> void between(const float *peaks, float low, float below, F f) const {
        long b = 0;
        for (; b + W <= blocks; b += W) {
            const Floats v = load(peaks + b);
            for (unsigned hits = bits((v >= low) & (v < below)); hits; hits &= hits - 1) f(b + __builtin_ctz(hits));
        }
        for (; b < blocks; b++)
            if (peaks[b] >= low && peaks[b] < below) f(b);
    }

    long reaching(const float *peaks, float low) const {
        Ints hits = {};
        long b = 0, count = 0;
        for (; b + W <= blocks; b += W) hits -= (Ints)(load(peaks + b) >= low);
        for (int i = 0; i < W; i++) count += hits[i];
        for (; b < blocks; b++) count += peaks[b] >= low;
        return count;
    }

    // What at least `kept` blocks reach, so that as many values do, and not many more blocks.
    float reached_by(long kept, const float *peaks, float best) const {
        float low = best, high, gap = 1;
        do {
            high = low, low = std::max(LOWEST, best - gap), gap *= 2;
        } while (reaching(peaks, low) < kept && low > LOWEST);
        for (int i = 0; i < NARROWED; i++) {
            const float middle = low / 2 + high / 2;
            (reaching(peaks, middle) < kept ? high : low) = middle;
        }
        return low;
    }

    // Calls f with every block of low <= peak < below. Memory cannot guess their places, and forgets what it is asked for
    // all at once: each is asked for a few before its turn.
    template <class F> void visit(float low, float below, F f) {
        wanted.clear();
        between(row.peaks, low, below, [&](long b) { wanted.push_back((int32_t)b); });
        for (size_t i = 0; i < std::min(COMING, wanted.size()); i++) fetch(wanted[i]);
        for (size_t i = 0; i < wanted.size(); i++) {
            if (i + COMING < wanted.size()) fetch(wanted[i + COMING]);
            f(wanted[i]);
        }
    }
    void fetch(long block) const {
        for (long i = 0; i < UNDER; i += 16) __builtin_prefetch(row.x + block * UNDER + i, 0, 2);
    }

    // Weighs the blocks whose peak reaches `low`, and bounds what the others can weigh.
    void weigh(float low, double temperature) {
        const Floats scale = splat((float)(1.4426950408889634 / temperature)), top = splat(row.best);
        Floats sums = {}, others = {};
        long taken = 0;
        visit(low, weighed, [&](long b) {
            each(b, [&](Floats v, long) { sums += exp2((v - top) * scale); });
            if (++taken % FLUSH == 0) mass += sum(sums), sums = Floats{};
        });
        mass += sum(sums);
        weighed = low;
        long b = 0;
        for (; b + W <= blocks; b += W) {
            const Floats v = load(row.peaks + b);
            others += pick(v < low, exp2((v - top) * scale), Floats{});
        }
        rest = sum(others);
        for (; b < blocks; b++)
            if (row.peaks[b] < low) rest += std::exp(((double)row.peaks[b] - row.best) / temperature);
        rest *= UNDER * ROUNDED;
    }

    // Candidates of low <= value < high.
    void collect(float low, float high) {
        visit(low, ABOVE_ALL, [&](long b) {
            each(b, [&](Floats v, long first) {
                for (unsigned hits = bits((v >= low) & (v < high)); hits; hits &= hits - 1) {
                    const long k = first + __builtin_ctz(hits);
                    found.push_back(rank(row.x[k], k));
                }
            });
        });
    }

    void take(uint64_t rank, double temperature) {
        const double before = reach.empty() ? 0 : reach.back();
        reach.push_back(before + std::exp(((double)value(rank) - row.best) / temperature));
        ids.push_back((int32_t)(uint32_t)rank);
    }

    // The first id whose reach is above this; what rounding left over goes to the best.
    int64_t fall_on(double goal) const {
        const size_t at = std::upper_bound(reach.begin(), reach.end(), goal) - reach.begin();
        return ids[at < ids.size() ? at : 0];
    }

    int64_t first_best() const {
        for (long i = block_of(row.peaks, row.best) * UNDER;; i++)
            if (row.x[i] == row.best) return i;
    }

    // The first block whose peak is the best; one is.
    long block_of(const float *peaks, float best) const {
        long b = 0;
        for (; b + W <= blocks; b += W)
            if (const unsigned hits = bits((Ints)(load(peaks + b) == best))) return b + __builtin_ctz(hits);
        while (peaks[b] != best) b++;
        return b;
    }

    // All that min-p and top-k leave are few enough to be sorted.
    int64_t among_kept(const Wish &wish) {
        const long kept = kept_by(wish);
        float low = kept <= blocks ? reached_by(kept, row.peaks, row.best) : LOWEST;
        if (wish.min_p > 0) low = std::max(low, (float)(row.best + wish.temperature * std::log(wish.min_p)));
        collect(low, ABOVE_ALL);
        if ((long)found.size() > kept) {
            std::nth_element(found.begin(), found.begin() + kept, found.end());
            found.resize(kept);
        }
        std::sort(found.begin(), found.end());
        for (uint64_t rank : found) take(rank, wish.temperature);
        if (wish.top_p < 1) nucleus(wish.top_p * reach.back());
        return fall_on(wish.chance * reach.back());
    }

    void nucleus(double mass_wanted) {
        const size_t at = std::lower_bound(reach.begin(), reach.end(), mass_wanted) - reach.begin();
        if (at < reach.size()) reach.resize(at + 1), ids.resize(at + 1);
    }

    // Takes candidates in the order of their ranks until they reach the goal, wider and wider below the best. False: all
    // there are do not.
    bool take_until(double goal, bool beyond, double temperature) {
        for (;;) {
            if (!reach.empty() && (beyond ? reach.back() > goal : reach.back() >= goal)) return true;
            while (found.empty()) {
                if (margins > std::size(MARGINS)) return false;
                const bool last = margins == std::size(MARGINS);
                const float low = last ? LOWEST : std::max(LOWEST, (float)(row.best - MARGINS[margins] * temperature));
                margins++;
                collect(low, high);
                high = low;
                std::make_heap(found.begin(), found.end(), std::greater<uint64_t>());
            }
            std::pop_heap(found.begin(), found.end(), std::greater<uint64_t>());
            take(found.back(), temperature);
            found.pop_back();
        }
    }

    // The candidate at which top-p cuts, or on which chance falls, is the same for the least and the most that the
    // row can weigh; where it is not, more of the row is weighed.
    int64_t among_all(const Wish &wish) {
        const bool cut = wish.top_p < 1;
        const double share = cut ? wish.top_p : wish.chance;
        high = ABOVE_ALL, margins = 0;
        mass = 0, weighed = ABOVE_ALL;
        for (size_t turn = 0;; turn++) {
            const bool all = turn == std::size(DEPTHS);
            weigh(all ? LOWEST : depth(turn, row.best, wish), wish.temperature);
            const double least = share * mass, most = share * (mass + rest);
            const bool there = take_until(least, !cut, wish.temperature);
            const auto at = cut ? std::lower_bound(reach.begin(), reach.end(), least)
                                : std::upper_bound(reach.begin(), reach.end(), least);
            if (!there && !all) continue;
            if (there && !all && !(cut ? *at >= most : *at > most)) continue;
            if (!cut) return ids[there ? at - reach.begin() : 0];
            if (there) {
                ids.resize(at - reach.begin() + 1);
                reach.resize(ids.size());
            }
            return fall_on(wish.chance * reach.back());
        }
    }

    static float depth(size_t turn, float best, const Wish &wish) {
        return std::max(LOWEST, (float)(best - DEPTHS[turn] * wish.temperature));
    }

    long kept_by(const Wish &wish) const { return wish.top_k > 0 && wish.top_k < n ? wish.top_k : n; }

    int64_t token(const Wish &wish) {
        found.clear(), reach.clear(), ids.clear();
        if (!(row.best > NOTHING)) return -1;  // nothing may be drawn, or NaN
        if (wish.temperature == 0) return row.token < 0 ? first_best() : row.token;
        return wish.top_k > 0 || wish.min_p > 0 ? among_kept(wish) : among_all(wish);
    }

  public:
    // logits [rows, vocab] and, where they are known, their peaks and bests -> the wishes' tokens.
    void draw(const float *logits, const float *known, const Best *bests, long rows, long vocab, Wish *wishes) {
        n = vocab, blocks = blocks_of(vocab);
        for (long at = 0; at < rows; at++) {
            Wish &wish = wishes[at];
            const float *x = logits + at * n;
            if (!known) own.resize(blocks), find_peaks(x, n, wish.masked, own.data());
            const float *peaks = known ? known + at * blocks : own.data();
            row = {x, peaks, bests ? bests[at].value : peak(peaks, blocks, wish.masked), bests ? bests[at].token : -1};
            wish.token = token(wish);
        }
    }
};

}  // namespace
