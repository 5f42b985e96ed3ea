// Attention over pages. A block of keys is laid out as a matrix product wants it, in scratch memory that stays in
// cache, and then met by all the queries of a tile that share the KV head. Softmax is kept as a running maximum and
// sum. Blocks start at fixed places, and a block that a query may not see changes none of its bits: what a query
// gives depends on its own keys alone, however it is batched.
#pragma once
#include "products.h"
#include <utility>
#include <vector>

namespace {

constexpr int BLOCK = 64;      // keys
constexpr int TILE = 128;      // query rows, roughly: tokens times the query heads of a KV head
constexpr int ACROSS = 2 * W;  // columns computed at a time

// Memory that is to come while something else is computed, a cache line at a time: many at once would be waited for.
class Expected {
  public:
    void clear() { runs.clear(), begun = 0, at = end = &none; }
    void add(const void *from, long bytes) { runs.push_back({(const char *)from, (const char *)from + bytes}); }
    Lines take(long lines) {
        if (at == end && begun < runs.size()) at = runs[begun].first, end = runs[begun++].second;
        const char *from = at;
        at = end - at > 64 * lines ? at + 64 * lines : end;
        return {from, at == from ? at : at - 1};  // a few, each call asking for one
    }

  private:
    static constexpr char none = 0;
    std::vector<std::pair<const char *, const char *>> runs;
    size_t begun = 0;
    const char *at = &none, *end = &none;
};

#if defined(__AVX512BF16__)
// Column j of 16 rows of 16 32-bit values becomes row j.
inline void transpose(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        __m512i even = _mm512_shuffle_i32x4(r[j], r[j + 4], 0x88), odd = _mm512_shuffle_i32x4(r[j], r[j + 4], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0xdd);
        t[j] = _mm512_shuffle_i32x4(even, even2, 0x88), t[j + 8] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        t[j + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88), t[j + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

// Keys to [dim / 2][BLOCK][2], values to [BLOCK / 2][wide][2].
inline void lay_out_pairs(const bf16 *const *k, const bf16 *const *v, long dim, long wide, bf16 *keys, bf16 *values,
                          Expected &expected) {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 32; i++) low[i] = i / 2 + 32 * (i % 2), high[i] = low[i] + 16;
    const __m512i lows = _mm512_load_si512(low), highs = _mm512_load_si512(high);
    for (long d = 0; d < dim; d += 32) {
        auto soon = expected.take(64);
        const long left = dim - d < 32 ? dim - d : 32;
        const __mmask32 mask = left == 32 ? ~0u : (1u << left) - 1;
        for (int i0 = 0; i0 < BLOCK; i0 += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi16(mask, k[i0 + i] + d);
            transpose(r);
            for (int i = 0; i < 8; i++) soon();
            for (int j = 0; j < left / 2; j++) _mm512_storeu_si512(keys + ((d / 2 + j) * BLOCK + i0) * 2, r[j]);
        }
        for (int i = 0; i < BLOCK; i += 2) {
            __m512i a = _mm512_maskz_loadu_epi16(mask, v[i] + d), b = _mm512_maskz_loadu_epi16(mask, v[i + 1] + d);
            bf16 *to = values + (i / 2 * wide + d) * 2;
            soon();
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, lows, b));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, highs, b));
        }
    }
}
#endif

#if defined(__AVX2__)
// Column j of 8 rows of 8 32-bit values becomes row j.
inline void transpose(__m256i (&r)[8]) {
    __m256i t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
        t[j + 4] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

// Eight keys' values at k[..][d..], 8 of float or 16 of bfloat16, to columns of `to` [d..][BLOCK].
inline void turn_keys(const float *const *k, long d, float *to) {
    __m256i r[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const __m256i *)(k[i] + d));
    transpose(r);
    for (int j = 0; j < 8; j++) _mm256_storeu_si256((__m256i *)(to + (d + j) * BLOCK), r[j]);
}
inline void turn_keys(const bf16 *const *k, long d, float *to) {  // in pairs, which are parted afterwards
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    __m256i r[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const __m256i *)(k[i] + d));
    transpose(r);
    for (int j = 0; j < 8; j++) {
        _mm256_storeu_si256((__m256i *)(to + (d + 2 * j) * BLOCK), _mm256_slli_epi32(r[j], 16));
        _mm256_storeu_si256((__m256i *)(to + (d + 2 * j + 1) * BLOCK), _mm256_and_si256(r[j], upper));
    }
}
#endif

// Keys to [dim][BLOCK], values to [BLOCK][wide], as floats.
template <class C>
void lay_out_floats(const C *const *k, const C *const *v, long dim, long wide, float *keys, float *values,
                    Expected &expected) {
    auto soon = expected.take(4 * BLOCK);
    long turned = 0;
#if defined(__AVX2__)
    constexpr long AT_ONCE = 32 / sizeof(C);
    turned = dim / AT_ONCE * AT_ONCE;
    for (long i = 0; i < BLOCK; i += 8)
        for (long d = 0; d < turned; d += AT_ONCE) {
            turn_keys(k + i, d, keys + i);
            for (int line = 0; line < 6; line++) soon();
        }
#endif
    for (long i = 0; i < BLOCK && turned < dim; i++) {
        for (long d = turned; d < dim; d++) keys[d * BLOCK + i] = widen(k[i][d]);
        for (int line = 0; line < 3; line++) soon();
    }
    for (long i = 0; i < BLOCK; i++) {
        float *to = values + i * wide;
        long d = 0;
        for (; d + W <= dim; d += W) store(to + d, load(v[i] + d));
        for (; d < dim; d++) to[d] = widen(v[i][d]);
        soon();
    }
}

// Where the pool keeps what: in values of C, from the pool's start.
struct Paging {
    long page_size, page, layer, width, head_dim;  // width: KV heads times head_dim
    // The key of `slot` of `page`; its value is page_size * width further.
    long at(long page_id, long in_layer, long slot) const { return page_id * page + in_layer * layer + slot * width; }
    // f(key) for each of `count` positions from `first` on.
    template <class C, class F>
    void walk(const C *in_layer, const int32_t *pages, long first, long count, F f) const {
        long left = page_size - first % page_size;
        const C *key = in_layer + at(pages[first / page_size], 0, page_size - left);
        for (pages += first / page_size + 1; count; count--) {
            f(key);
            key += width;
            if (!--left && count > 1) left = page_size, key = in_layer + at(*pages++, 0, 0);
        }
    }
};

// Queries, scaled to powers of two, of `heads` KV heads and of `count` tokens from position `start` on: for each KV
// head [count, group, head_dim], and `apart` values from one to the next. `pool` points at the first of these heads
// in its layer. Token t's heads go to out + t * outs.
template <class C, class O> struct Task {
    const Act<C> *queries;
    long apart, heads, count, group, start;
    const C *pool;
    const int32_t *pages;
    O *out;
    long outs;
    long end() const { return start + count; }
};

template <class C> struct Attention {
    using P = Act<C>;  // what products here are made of
    Paging paging;
    long dim, wide;  // head_dim, and as columns of a product
    std::vector<P> keys, values, weights;
    std::vector<float> scores, sums, best, total;  // the last three: of every KV head's every row
    std::vector<C> zeros;
    Expected expected;

    Attention(const Paging &paging, long group)
        : paging(paging), dim(paging.head_dim), wide(up(dim, ACROSS)), keys(dim * BLOCK), values(BLOCK * wide),
          weights(ROWS * BLOCK), scores(ROWS * BLOCK), best(paging.width / dim * (TILE + group)), total(best.size()),
          zeros(dim + 64) {
        sums.resize(best.size() * wide);
    }

    static long tokens_at_once(long group) { return group < TILE ? TILE / group : 1; }

    // `next`, if there is one, is what this thread will be given next.
    template <class O> void attend(const Task<C, O> &task, const Task<C, O> *next) {
        const long rows = task.count * task.group, all = rows * task.heads, end = task.end();
        std::fill(sums.begin(), sums.begin() + all * wide, 0.0f);
        std::fill(total.begin(), total.begin() + all, 0.0f);
        std::fill(best.begin(), best.begin() + all, -__builtin_inff());
        for (long first = 0; first < end; first += BLOCK)
            for (long head = 0; head < task.heads; head++) {
                if (head == 0 && first + BLOCK < end)
                    announce(task, first + BLOCK);
                else if (head == 0 && next)
                    announce(*next, 0);
                gather(task.pool + head * dim, task.pages, first, end - first < BLOCK ? end - first : BLOCK);
                for (long r0 = 0; r0 < rows; r0 += ROWS)
                    with_rows(rows - r0, [&](auto count) {
                        constexpr int R = count;
                        // Of these rows the last sees most: none of this block?
                        if (task.start + (r0 + R - 1) / task.group < first) return;
                        see<R>(task.queries + head * task.apart + r0 * dim, task.start, task.group, r0,
                               head * rows + r0, first);
                    });
            }
        for (long row = 0; row < all; row++) {
            const long head = row / rows, r = row % rows;
            O *to = task.out + r / task.group * task.outs + (head * task.group + r % task.group) * dim;
            const float whole = total[row];
            for (long d = 0; d < dim; d++) put(to + d, sums[row * wide + d] / whole);
        }
    }

  private:
    // Rows r0.. of a head's, whose state is at `row`.., look at the block of keys that begins at `first`.
    template <int R> void see(const P *queries, long start, long group, long r0, long row, long first) {
        for (long c = 0; c < BLOCK; c += ACROSS) {
            Floats s[R][2] = {};
            multiply(s, queries, dim, keys.data() + c * UNIT<P>, BLOCK, dim, expected.take(dim / UNIT<P>));
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++) store(&scores[r * BLOCK + c + W * i], s[r][i]);
        }
        float fade[R];
        for (int r = 0; r < R; r++) {
            const long seen = start + (r0 + r) / group + 1 - first;
            fade[r] = weigh(&scores[r * BLOCK], &weights[r * BLOCK], (float)seen, best[row + r], total[row + r]);
        }
        for (long c = 0; c < wide; c += ACROSS) {
            Floats s[R][2];
            float *to = &sums[row * wide + c];
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++) s[r][i] = load(to + r * wide + W * i) * splat(fade[r]);
            multiply(s, weights.data(), BLOCK, values.data() + c * UNIT<P>, wide, BLOCK, expected.take(BLOCK / UNIT<P>));
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++) store(to + r * wide + W * i, s[r][i]);
        }
    }

    // Scores to weights, those from `seen` on to 0. Returns what earlier blocks' sums are to be multiplied with.
    static __attribute__((noinline)) float weigh(const float *scores, P *weights, float seen, float &best, float &total) {
        const Floats hidden = splat(-__builtin_inff());
        Floats s[BLOCK / W], most = hidden;
        for (int i = 0; i < BLOCK / W; i++) {
            s[i] = pick(counting() + splat((float)(W * i)) < splat(seen), load(scores + W * i), hidden);
            most = larger(most, s[i]);
        }
        const float now = largest(most), then = best;
        best = now > then ? now : then;
        Floats sum_here = {};
        for (int i = 0; i < BLOCK / W; i++) {
            Floats weight = exp2(s[i] - splat(best));
            sum_here += weight;
            store(weights + W * i, weight);
        }
        const float fade = exp2(splat(then - best))[0];
        total = total * fade + sum(sum_here);
        return fade;
    }

    // Expects the block from position `first` on, in runs that are as long as they can be.
    template <class O> void announce(const Task<C, O> &task, long first) {
        expected.clear();
        const long bytes = task.heads * dim * (long)sizeof(C), half = paging.page_size * paging.width;
        const bool whole = task.heads * dim == paging.width;
        for (long p = first, end = first + BLOCK < task.end() ? first + BLOCK : task.end(); p < end;) {
            const long slot = p % paging.page_size, left = paging.page_size - slot;
            const long slots = !whole ? 1 : left < end - p ? left : end - p;
            const C *key = task.pool + paging.at(task.pages[p / paging.page_size], 0, slot);
            if (slots == paging.page_size) {
                expected.add(key, 2 * half * (long)sizeof(C));
            } else {
                expected.add(key, slots * bytes);
                expected.add(key + half, slots * bytes);
            }
            p += slots;
        }
    }

    // Lays out `count` keys and values from position `first` on; the rest of the block is zero.
    void gather(const C *pool, const int32_t *pages, long first, long count) {
        const C *k[BLOCK], *v[BLOCK];
        long i = 0;
        paging.walk(pool, pages, first, count, [&](const C *key) {
            k[i] = key, v[i] = key + paging.page_size * paging.width;
            i++;
        });
        for (; i < BLOCK; i++) k[i] = v[i] = zeros.data();
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<C, bf16>)
            return lay_out_pairs(k, v, dim, wide, keys.data(), values.data(), expected);
#endif
        if constexpr (std::is_same_v<P, float>) lay_out_floats(k, v, dim, wide, keys.data(), values.data(), expected);
    }
};

}  // namespace
