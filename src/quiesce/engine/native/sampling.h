// Draws tokens from logits and their peaks: only blocks are read that have a candidate, or mass that may decide.
#pragma once
#include "peaks.h"
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

namespace {

// As in library.py. top_k 0: no bound. `token` is the answer; -1: the row has a NaN or an infinity.
struct Wish {
    double temperature, top_p, min_p, chance;
    int64_t top_k, masked, token;  // masked: -inf is a token that must not be drawn
};

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
    static constexpr double MARGINS[] = {4, 8, 16};  // how far below the best candidates reach, in turn, by temperature
    static constexpr double DEPTHS[] = {10, 14, 18};  // and how far blocks are weighed
    static constexpr float LOWEST = std::numeric_limits<float>::lowest();
    static constexpr float ABOVE_ALL = std::numeric_limits<float>::infinity();
    static constexpr double ROUNDED = 1.00001;  // the rest of the mass is not estimated too low

    const float *x, *peaks;
    long n, blocks;
    float best;
    double mass, rest;               // the sum of exp((x - best) / temperature) in what was weighed; at most, elsewhere
    float weighed;                   // blocks whose peak reaches this are
    std::vector<float> own;          // peaks that did not come with the logits
    std::vector<float> sorting;
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

    // Calls f with every vector of a block; beyond the end of the row there is nothing.
    template <class F> void each(long block, F f) const {
        const long first = block * UNDER;
        if (first + UNDER <= n) {
            for (long i = 0; i < UNDER; i += W) f(load(x + first + i));
            return;
        }
        for (long i = first; i < n; i += W) {
            float rest[W];
            for (int k = 0; k < W; k++) rest[k] = i + k < n ? x[i + k] : NOTHING;
            f(load(rest));
        }
    }

    // Tells memory which blocks are about to be read: their places are in no order that it could guess.
    void fetch(float low, float below) const {
        for (long b = 0; b < blocks; b++)
            if (peaks[b] >= low && peaks[b] < below)
                for (long i = 0; i < UNDER; i += 16) __builtin_prefetch(x + b * UNDER + i, 0, 3);
    }

    // Weighs the blocks whose peak reaches `low`, and bounds what the others can weigh.
    void weigh(float low, double temperature) {
        const Floats scale = splat((float)(1.4426950408889634 / temperature)), top = splat(best);
        Floats sums = {}, others = {};
        long taken = 0;
        fetch(low, weighed);
        for (long b = 0; b < blocks; b++) {
            if (peaks[b] < low || peaks[b] >= weighed) continue;
            each(b, [&](Floats v) { sums += exp2((v - top) * scale); });
            if (++taken % FLUSH == 0) mass += sum(sums), sums = Floats{};
        }
        mass += sum(sums);
        weighed = low;
        long b = 0;
        for (; b + W <= blocks; b += W) {
            const Floats v = load(peaks + b);
            others += pick(v < low, exp2((v - top) * scale), Floats{});
        }
        rest = sum(others);
        for (; b < blocks; b++)
            if (peaks[b] < low) rest += std::exp(((double)peaks[b] - best) / temperature);
        rest *= UNDER * ROUNDED;
    }

    // Candidates of low <= value < high.
    void collect(float low, float high) {
        for (long b = 0; b < blocks; b++) {
            if (peaks[b] < low) continue;
            for (long i = b * UNDER; i < (b + 1) * UNDER && i < n; i += W) {
                if (i + W <= n && largest(load(x + i)) < low) continue;  // most have none
                for (long k = i; k < i + W && k < n; k++)
                    if (x[k] >= low && x[k] < high) found.push_back(rank(x[k], k));
            }
        }
    }

    void take(uint64_t rank, double temperature) {
        const double before = reach.empty() ? 0 : reach.back();
        reach.push_back(before + std::exp(((double)value(rank) - best) / temperature));
        ids.push_back((int32_t)(uint32_t)rank);
    }

    // The first id whose reach is above this; what rounding left over goes to the best.
    int64_t fall_on(double goal) const {
        const size_t at = std::upper_bound(reach.begin(), reach.end(), goal) - reach.begin();
        return ids[at < ids.size() ? at : 0];
    }

    int64_t first_best() const {
        for (long b = 0;; b++)
            if (peaks[b] == best)
                for (long i = b * UNDER;; i++)
                    if (x[i] == best) return i;
    }

    // All that min-p and top-k leave are few enough to be sorted.
    int64_t among_kept(const Wish &wish, long kept) {
        float low = LOWEST;
        if (wish.min_p > 0) low = std::max(low, (float)(best + wish.temperature * std::log(wish.min_p)));
        if (kept <= blocks) {  // so many blocks reach it, so the kept ones do
            sorting.assign(peaks, peaks + blocks);
            std::nth_element(sorting.begin(), sorting.begin() + kept - 1, sorting.end(), std::greater<float>());
            low = std::max(low, sorting[kept - 1]);
        }
        fetch(low, ABOVE_ALL);
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
                const float low = last ? LOWEST : std::max(LOWEST, (float)(best - MARGINS[margins] * temperature));
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
            weigh(all ? LOWEST : std::max(LOWEST, (float)(best - DEPTHS[turn] * wish.temperature)), wish.temperature);
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

  public:
    // logits [n] and, where they are known, their peaks -> wish.token
    void draw(const float *logits, const float *known, long vocab, Wish &wish) {
        x = logits, n = vocab, blocks = blocks_of(vocab), peaks = known;
        found.clear(), reach.clear(), ids.clear();
        if (!peaks) {
            own.resize(blocks);
            find_peaks(x, n, wish.masked, own.data());
            peaks = own.data();
        }
        best = peak(peaks, blocks, wish.masked);
        if (!(best > NOTHING))  // nothing may be drawn, or NaN
            wish.token = -1;
        else if (wish.temperature == 0)
            wish.token = first_best();
        else if (wish.top_k > 0 || wish.min_p > 0)
            wish.token = among_kept(wish, wish.top_k > 0 && wish.top_k < vocab ? wish.top_k : vocab);
        else
            wish.token = among_all(wish);
    }
};

}  // namespace
