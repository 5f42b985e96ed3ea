// Keys and values laid out as a matrix product wants them, and the memory that is asked for meanwhile.
#pragma once
#include "products.h"
#include <utility>
#include <vector>

namespace {

constexpr int BLOCK = 64;      // keys
constexpr int ACROSS = 2 * W;  // columns computed at a time

// Memory that is to come while something else is computed, a cache line at a time: many at once would be waited for.
class Expected {
  public:
    void clear() { runs.clear(), begun = 0, at = end = &none; }
    // Forgets what has been asked for, and what is too much to be asked for in time.
    void trim() {
        if (runs.size() - begun > 64) return clear();
        runs.erase(runs.begin(), runs.begin() + begun), begun = 0;
    }
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

}  // namespace
