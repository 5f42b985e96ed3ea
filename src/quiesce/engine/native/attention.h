// Attention over pages. A block of keys is laid out as a matrix product wants it, in scratch memory that stays in
// cache, and then met by all the queries of a tile that share the KV head. Softmax is kept as a running maximum and
// sum. Blocks start at fixed places, and a block that a query may not see changes none of its bits: what a query
// gives depends on its own keys alone, however it is batched.
#pragma once
#include "products.h"
#include <vector>

namespace {

constexpr int BLOCK = 64;      // keys
constexpr int TILE = 128;      // query rows, roughly: tokens times the query heads of a KV head
constexpr int ACROSS = 2 * W;  // columns computed at a time

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
inline void lay_out_pairs(const bf16 *const *k, const bf16 *const *v, long dim, long wide, bf16 *keys, bf16 *values) {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 32; i++) low[i] = i / 2 + 32 * (i % 2), high[i] = low[i] + 16;
    const __m512i lows = _mm512_load_si512(low), highs = _mm512_load_si512(high);
    for (long d = 0; d < dim; d += 32) {
        const long left = dim - d < 32 ? dim - d : 32;
        const __mmask32 mask = left == 32 ? ~0u : (1u << left) - 1;
        for (int i0 = 0; i0 < BLOCK; i0 += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi16(mask, k[i0 + i] + d);
            transpose(r);
            for (int j = 0; j < left / 2; j++) _mm512_storeu_si512(keys + ((d / 2 + j) * BLOCK + i0) * 2, r[j]);
        }
        for (int i = 0; i < BLOCK; i += 2) {
            __m512i a = _mm512_maskz_loadu_epi16(mask, v[i] + d), b = _mm512_maskz_loadu_epi16(mask, v[i + 1] + d);
            bf16 *to = values + (i / 2 * wide + d) * 2;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, lows, b));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, highs, b));
        }
    }
}
#endif

// Where the pool keeps what: in values of C, from the pool's start.
struct Paging {
    long page_size, page, layer, width, head_dim;  // width: KV heads times head_dim
    // The key of `slot` of `page`; its value is page_size * width further.
    long at(long page_id, long in_layer, long slot) const { return page_id * page + in_layer * layer + slot * width; }
};

template <class C> struct Attention {
    using P = Act<C>;  // what products here are made of
    long dim, wide;  // head_dim, and as columns of a product
    std::vector<P> keys, values, weights;
    std::vector<float> sums, scores, best, total;
    std::vector<C> zeros;

    Attention(long head_dim, long group)
        : dim(head_dim), wide(up(head_dim, ACROSS)), keys(dim * BLOCK), values(BLOCK * wide), weights(ROWS * BLOCK),
          sums((TILE + group) * wide), scores(ROWS * BLOCK), best(TILE + group), total(TILE + group),
          zeros(dim + 64) {}

    static long tokens_at_once(long group) { return group < TILE ? TILE / group : 1; }

    // Queries [tokens * group, dim], scaled to powers of two, of one KV head whose first token is at `start`;
    // `pool` points at that head in that layer. Token t's heads go to out + t * outs.
    template <class O>
    void attend(const P *queries, long tokens, long group, long start, const C *pool, const Paging &paging,
                const int32_t *pages, O *out, long outs) {
        const long rows = tokens * group, end = start + tokens;
        std::fill(sums.begin(), sums.begin() + rows * wide, 0.0f);
        std::fill(total.begin(), total.begin() + rows, 0.0f);
        std::fill(best.begin(), best.begin() + rows, -__builtin_inff());
        for (long first = 0; first < end; first += BLOCK) {
            gather(pool, paging, pages, first, end - first < BLOCK ? end - first : BLOCK);
            for (long r0 = 0; r0 < rows; r0 += ROWS)
                with_rows(rows - r0, [&](auto count) {
                    constexpr int R = count;
                    // of the row's last token, so the tile's most: none of this block?
                    if (start + (r0 + R - 1) / group < first) return;
                    see<R>(queries + r0 * dim, start, r0, group, first);
                });
        }
        for (long r = 0; r < rows; r++) {
            O *to = out + r / group * outs + r % group * dim;
            for (long d = 0; d < dim; d++) put(to + d, sums[r * wide + d] / total[r]);
        }
    }

  private:
    // Rows r0.. of the tile look at the block of keys that begins at `first`.
    template <int R> void see(const P *queries, long start, long r0, long group, long first) {
        for (long c = 0; c < BLOCK; c += ACROSS) {
            Floats s[R][2] = {};
            multiply<R, 2, 0>(s, queries, dim, keys.data() + c * UNIT<P>, BLOCK, dim);
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++) store(&scores[r * BLOCK + c + W * i], s[r][i]);
        }
        float fade[R];
        for (int r = 0; r < R; r++) {
            const long row = r0 + r, seen = start + row / group + 1 - first;
            fade[r] = weigh(&scores[r * BLOCK], &weights[r * BLOCK], (float)seen, best[row], total[row]);
        }
        for (long c = 0; c < wide; c += ACROSS) {
            Floats s[R][2];
            float *to = &sums[r0 * wide + c];
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++) s[r][i] = load(to + r * wide + W * i) * splat(fade[r]);
            multiply<R, 2, 0>(s, weights.data(), BLOCK, values.data() + c * UNIT<P>, wide, BLOCK);
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++) store(to + r * wide + W * i, s[r][i]);
        }
    }

    // Scores to weights, those from `seen` on to 0. Returns what earlier blocks' sums are to be multiplied with.
    static float weigh(const float *scores, P *weights, float seen, float &best, float &total) {
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

    // Lays out `count` keys and values from position `first` on; the rest of the block is zero.
    void gather(const C *pool, const Paging &paging, const int32_t *pages, long first, long count) {
        const C *k[BLOCK], *v[BLOCK];
        for (long i = 0; i < BLOCK; i++) {
            const long page = (first + i) / paging.page_size, slot = (first + i) % paging.page_size;
            k[i] = i < count ? pool + paging.at(pages[page], 0, slot) : zeros.data();
            v[i] = i < count ? k[i] + paging.page_size * paging.width : zeros.data();
        }
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<C, bf16>) return lay_out_pairs(k, v, dim, wide, keys.data(), values.data());
#endif
        if constexpr (std::is_same_v<P, float>) {
            float *to = keys.data();
            for (long i = 0; i < BLOCK; i++)
                for (long d = 0; d < dim; d++) to[d * BLOCK + i] = widen(k[i][d]);
            to = values.data();
            for (long i = 0; i < BLOCK; i++)
                for (long d = 0; d < dim; d++) to[i * wide + d] = widen(v[i][d]);
        }
    }
};

}  // namespace
