// The peaks of logits: the largest of each block of a row, taken while the block is still in cache, and the best of all.
#pragma once
#include "products.h"
#include <limits>
#include <numeric>

namespace {

constexpr long UNDER = 64;  // floats under a peak
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// The largest of x [n]; NaN when one of them is not finite. `masked`: -inf is a token that must not be drawn.
inline float peak(const float *x, long n, bool masked) {
    Floats top = splat(NOTHING), spoilt = {};
    long i = 0;
    for (; i + W <= n; i += W) {
        const Floats v = load(x + i);
        top = larger(top, v);
        spoilt = fma(v, splat(0), spoilt);
    }
    float best = largest(top), rest = 0;
    for (; i < n; i++) {
        best = x[i] > best ? x[i] : best;
        rest += x[i] * 0;
    }
    if (masked) return best;
    const bool sound = largest(pick(spoilt == spoilt, Floats{}, splat(1))) == 0 && rest == 0;
    return sound ? best : std::numeric_limits<float>::quiet_NaN();
}

inline long blocks_of(long n) { return up(n, UNDER) / UNDER; }

inline void find_peaks(const float *x, long n, bool masked, float *peaks) {
    for (long b = 0; b < blocks_of(n); b++)
        peaks[b] = peak(x + b * UNDER, n - b * UNDER < UNDER ? n - b * UNDER : UNDER, masked);
}

// The largest logit of a row, NaN where one is not finite, and the first token that has it. As in library.py.
struct Best {
    float value = NOTHING;
    int32_t token = -1;

    bool beaten_by(float peak) const { return !(peak <= value) && value == value; }
};

// As `product`, a few blocks of columns at a time, whose peaks [rows, blocks] are then taken; `bests` [rows] are of this
// part alone. Threads share the pieces.
template <class T>
void product_and_peaks(const Act<T> *x, long apart, long rows, const Matrix &m, float *out, long outs, float *peaks,
                       Best *bests, int part, int parts) {
    constexpr long AT_ONCE = std::lcm((long)COLUMNS, UNDER);
    const long pieces = up(m.n, AT_ONCE) / AT_ONCE, all = blocks_of(m.n);
    if (rows > TALL) {  // what `product` takes at a time
        product_and_peaks<T>(x, apart, TALL, m, out, outs, peaks, bests, part, parts);
        const long rest = rows - TALL;
        return product_and_peaks<T>(x + TALL * apart, apart, rest, m, out + TALL * outs, outs, peaks + TALL * all,
                                    bests + TALL, part, parts);
    }
    for (long piece = pieces * part / parts; piece < pieces * (part + 1) / parts; piece++) {
        const long first = piece * AT_ONCE, here = m.n - first < AT_ONCE ? m.n - first : AT_ONCE;
        const char *panels = m.panels + first / COLUMNS * panel_bytes<T>(m.depth);
        product<T>(x, apart, rows, {panels, here, m.depth}, out + first, outs, false, 0, 1);
        for (long r = 0; r < rows; r++) {
            const float *row = out + r * outs;
            float *found = peaks + r * all + first / UNDER;
            find_peaks(row + first, here, false, found);
            for (long b = 0; b < blocks_of(here); b++) {
                if (!bests[r].beaten_by(found[b])) continue;
                long token = first + b * UNDER;
                while (found[b] == found[b] && row[token] != found[b]) token++;
                bests[r] = {found[b], (int32_t)token};
            }
        }
    }
}

}  // namespace
