// Attention of a few rows on AVX2, which is what decoding asks for: one token's query heads meet each key once, so keys
// and values laid out as floats would cost more than the products. Keys are turned in pairs of bfloat16 and widened on
// the way to the product; values are read where they lie. Sums are in the order of `Attention::see`, to the same bits.
#pragma once
#include "keys.h"

namespace {

constexpr int ABREAST = 72;  // keys of a block, 64, up to a multiple of three vectors

#if defined(__AVX2__) && !defined(__AVX512F__)
// Pairs of dims of eight keys, from k[..][d..], 8 dims of each, to rows d / 2.. of `to` [dim / 2][ABREAST] pairs.
inline void turn_pairs(const bf16 *const *k, long d, uint32_t *to) {
    __m256i r[4], t[4];
    for (int i = 0; i < 4; i++)
        r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(k[i] + d))),
                                       _mm_loadu_si128((const __m128i *)(k[i + 4] + d)), 1);
    for (int i = 0; i < 4; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        _mm256_storeu_si256((__m256i *)(to + (2 * i) * ABREAST), _mm256_unpacklo_epi64(t[i], t[i + 2]));
        _mm256_storeu_si256((__m256i *)(to + (2 * i + 1) * ABREAST), _mm256_unpackhi_epi64(t[i], t[i + 2]));
    }
}

// In assembler for the reason that `accumulate` has.
inline __attribute__((always_inline)) void add_product(Floats &to, Floats a, Floats b) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(to) : "x"(a), "x"(b));
}
inline __attribute__((always_inline)) Floats everywhere(const float *x) {
    Floats a;
    asm volatile("vbroadcastss %1, %0" : "=x"(a) : "m"(*x));
    return a;
}

// sums[r][s] += queries (`dim` apart) by keys of `pairs`, S vectors of columns.
template <int R, int S, class F>
__attribute__((noinline)) void score(Floats (&sums)[R][S], const float *queries, long dim, const uint32_t *pairs,
                                     F soon) {
    struct Tile {
        Floats at[R][S];
    } tile = (Tile &)sums;
    for (long d = 0; d < dim; d += 2, pairs += ABREAST) {
        soon();
        for (int part = 0; part < 2; part++) {
            Floats q[R];
            for (int r = 0; r < R; r++) q[r] = everywhere(queries + r * dim + d + part);
            for (int s = 0; s < S; s++) {
                const Floats key = load_part((const bf16 *)(pairs + W * s), part);
                for (int r = 0; r < R; r++) add_product(tile.at[r][s], q[r], key);
            }
        }
    }
    (Tile &)sums = tile;
}

// sums[r] += weights [R][ABREAST] by S vectors of `count` values from `first` dims on: of each 16 dims the even ones,
// then the odd ones. With ODD they begin with odd ones.
template <int R, int S, bool ODD, class F>
__attribute__((noinline)) void add_values(Floats (&sums)[R][S], const float *weights, const bf16 *const *v, long first,
                                          long count, F soon) {
    struct Tile {
        Floats at[R][S];
    } tile = (Tile &)sums;
    for (long i = 0; i < count; i++) {
        soon();
        const bf16 *value = v[i] + first;
        Floats w[R];
        for (int r = 0; r < R; r++) w[r] = everywhere(weights + r * ABREAST + i);
        for (int s = 0; s < S; s++) {
            const Floats part = load_part(value + (s + ODD) / 2 * 2 * W, (s + ODD) % 2);
            for (int r = 0; r < R; r++) add_product(tile.at[r][s], w[r], part);
        }
    }
    (Tile &)sums = tile;
}
#endif

}  // namespace
