// Draws tokens: one pass over a row of logits finds the largest of each block and, where it is wanted, the mass of the
// whole row; then only the blocks are read again that have a candidate.
#pragma once
#include "vectors.h"
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

class Sampler {
    static constexpr long BLOCK = 64, FLUSH = 16;  // floats; blocks whose float sums are added before a double takes them
    static constexpr double MARGINS[] = {4, 8, 16};  // how far below the best candidates reach, in turn, by temperature
    static constexpr float LOWEST = std::numeric_limits<float>::lowest(), NOTHING = -std::numeric_limits<float>::infinity();

    const float *x;
    long n;
    float best;
    double mass;                     // the sum of exp((x - best) / temperature)
    std::vector<float> largest_of;   // of each block
    std::vector<float> sorting;
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
        const long first = block * BLOCK;
        if (first + BLOCK <= n) {
            for (long i = 0; i < BLOCK; i += W) f(load(x + first + i));
            return;
        }
        for (long i = first; i < n; i += W) {
            float rest[W];
            for (int k = 0; k < W; k++) rest[k] = i + k < n ? x[i + k] : NOTHING;
            f(load(rest));
        }
    }

    // False: not finite.
    bool survey(bool weigh, double temperature, bool masked) {
        const Floats scale = splat((float)(1.4426950408889634 / temperature));
        Floats poison = {}, sums = {};
        const long blocks = up(n, BLOCK) / BLOCK;
        largest_of.resize(blocks);
        best = NOTHING;
        mass = 0;
        for (long b = 0; b < blocks; b++) {
            Floats top = splat(NOTHING);
            Floats spoilt = poison;
            each(b, [&](Floats v) {
                top = larger(top, v);
                spoilt = fma(v, splat(0), spoilt);
            });
            if ((b + 1) * BLOCK <= n)
                poison = spoilt;
            else  // what fills up the last block is not finite
                for (long i = b * BLOCK; i < n; i++) poison[0] += x[i] * 0;
            const float here = largest_of[b] = largest(top);
            if (here > best) {
                mass = (mass + sum(sums)) * std::exp(((double)best - here) / temperature);
                sums = Floats{};
                best = here;
            }
            if (weigh && here > NOTHING) {
                const Floats least = splat(best);
                each(b, [&](Floats v) { sums += exp2((v - least) * scale); });
            }
            if (b % FLUSH == FLUSH - 1) mass += sum(sums), sums = Floats{};
        }
        mass += sum(sums);
        return best > NOTHING && (masked || sum(poison) == 0);
    }

    // Candidates of low <= value < high.
    void collect(float low, float high) {
        for (size_t b = 0; b < largest_of.size(); b++) {
            if (largest_of[b] < low) continue;
            for (long i = b * BLOCK; i < (long)(b + 1) * BLOCK && i < n; i++)
                if (x[i] >= low && x[i] < high) found.push_back(rank(x[i], i));
        }
    }

    void take(uint64_t rank, double temperature) {
        const double before = reach.empty() ? 0 : reach.back();
        reach.push_back(before + std::exp(((double)value(rank) - best) / temperature));
        ids.push_back((int32_t)(uint32_t)rank);
    }

    // The first id whose reach is above this; what rounding left over goes to the best.
    int64_t pick(double goal) const {
        const size_t at = std::upper_bound(reach.begin(), reach.end(), goal) - reach.begin();
        return ids[at < ids.size() ? at : 0];
    }

    int64_t first_best() const {
        for (size_t b = 0;; b++)
            if (largest_of[b] == best)
                for (long i = b * BLOCK;; i++)
                    if (x[i] == best) return i;
    }

    // All that min-p and top-k leave are few enough to be sorted.
    int64_t among_kept(const Wish &wish, long kept) {
        float low = LOWEST;
        if (wish.min_p > 0) low = std::max(low, (float)(best + wish.temperature * std::log(wish.min_p)));
        if (kept <= (long)largest_of.size()) {  // so many blocks reach it, so the kept ones do
            sorting = largest_of;
            std::nth_element(sorting.begin(), sorting.begin() + kept - 1, sorting.end(), std::greater<float>());
            low = std::max(low, sorting[kept - 1]);
        }
        collect(low, std::numeric_limits<float>::infinity());
        if ((long)found.size() > kept) {
            std::nth_element(found.begin(), found.begin() + kept, found.end());
            found.resize(kept);
        }
        std::sort(found.begin(), found.end());
        for (uint64_t rank : found) take(rank, wish.temperature);
        if (wish.top_p < 1) nucleus(wish.top_p * reach.back());
        return pick(wish.chance * reach.back());
    }

    void nucleus(double mass_wanted) {
        const size_t at = std::lower_bound(reach.begin(), reach.end(), mass_wanted) - reach.begin();
        if (at < reach.size()) reach.resize(at + 1), ids.resize(at + 1);
    }

    // Candidates in the order of their ranks until they reach far enough, wider and wider below the best.
    int64_t among_all(const Wish &wish) {
        const bool cut = wish.top_p < 1;
        const double goal = (cut ? wish.top_p : wish.chance) * mass;
        float high = std::numeric_limits<float>::infinity();
        for (size_t turn = 0; turn <= std::size(MARGINS); turn++) {
            const bool last = turn == std::size(MARGINS);
            const float low = last ? LOWEST : std::max(LOWEST, (float)(best - MARGINS[turn] * wish.temperature));
            found.clear();
            collect(low, high);
            high = low;
            std::make_heap(found.begin(), found.end(), std::greater<uint64_t>());
            while (!found.empty()) {
                std::pop_heap(found.begin(), found.end(), std::greater<uint64_t>());
                take(found.back(), wish.temperature);
                found.pop_back();
                if (cut ? reach.back() >= goal : reach.back() > goal)
                    return cut ? pick(wish.chance * reach.back()) : ids.back();
            }
        }
        return cut ? pick(wish.chance * reach.back()) : ids[0];
    }

  public:
    // logits [n] -> wish.token
    void draw(const float *logits, long vocab, Wish &wish) {
        x = logits, n = vocab;
        found.clear(), reach.clear(), ids.clear();
        const bool greedy = wish.temperature == 0, some = wish.top_k > 0 || wish.min_p > 0;
        if (!survey(!greedy && !some, greedy ? 1 : wish.temperature, wish.masked))
            wish.token = -1;
        else if (greedy)
            wish.token = first_best();
        else if (some)
            wish.token = among_kept(wish, wish.top_k > 0 && wish.top_k < vocab ? wish.top_k : vocab);
        else
            wish.token = among_all(wish);
    }
};

}  // namespace
