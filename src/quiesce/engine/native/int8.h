// int8 weights multiplied in whole numbers, where the CPU has no products of bfloat16. Activations are rounded to 16
// bits, SHARED neighbours in a row with a power of two in common, so that what bfloat16 keeps is kept but for what is
// 128 times smaller than the largest of them. A group's sum is exact, and scaled and added to the others' as a float.
#pragma once
#include "int4.h"

namespace {

constexpr long AHEAD = 6144;  // bytes from what is read to what is fetched: the memory's latency
constexpr int SHARED = 64;  // 64 * 127 * 2^15 is within an int32

// What a product may be cut to multiples of, in depth.
template <class T> constexpr int CUT = WHOLE<T> ? SHARED : UNIT<T>;

#if defined(__AVX2__) && !defined(__AVX512F__)
#define INLINE inline __attribute__((always_inline))

// Activations as whole numbers, and the scales of their groups; NaN for a group that is not finite.
class Rounded {
  public:
    Rounded(const float *x, long apart, long rows, long depth) : groups(up(depth, SHARED) / SHARED) {
        static thread_local std::vector<int16_t> values;
        static thread_local std::vector<float> scales;
        values.resize(rows * groups * SHARED), scales.resize(rows * groups);
        int16_t *to = values.data();
        float *scale = scales.data();
        for (const float *end = x + rows * apart; x < end; x += apart)
            for (long k = 0; k < depth; k += SHARED, to += SHARED) {
                if (depth - k >= SHARED) {
                    *scale++ = round(x + k, to);
                } else {
                    float last[SHARED] = {};
                    memcpy(last, x + k, (depth - k) * sizeof(float));
                    *scale++ = round(last, to);
                }
            }
        values_ = values.data(), scales_ = scales.data();
    }
    const int16_t *row(long r) const { return values_ + r * groups * SHARED; }
    const float *scales_of(long r) const { return scales_ + r * groups; }
    const long groups;

  private:
    static float round(const float *x, int16_t *to) {
        constexpr uint32_t least = 20u << 23, bits = 14u << 23;  // exponents: below which all are 0; of 2^14
        const Words magnitude = Words{} + 0x7fffffffu;
        Floats top = {}, spoilt = {};
        for (int i = 0; i < SHARED; i += W) {
            top = larger((Floats)((Words)load(x + i) & magnitude), top);
            spoilt = fma(load(x + i), splat(0), spoilt);
        }
        const float above = largest(top);
        uint32_t exponent = read<uint32_t>(&above) & 0x7f800000;
        exponent = exponent < least ? least : exponent;
        const uint32_t up_by = (254u << 23) + bits - exponent, down_by = exponent - bits;
        const Floats by = splat(read<float>(&up_by));
        for (int i = 0; i < SHARED; i += 2 * W) {
            const __m256i low = _mm256_cvtps_epi32((__m256)(load(x + i) * by));
            const __m256i high = _mm256_cvtps_epi32((__m256)(load(x + i + W) * by));
            write(to + i, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
        }
        return read<float>(&down_by) + sum(spoilt);  // what is past 32,767 becomes that: half a step
    }
    const int16_t *values_;
    const float *scales_;
};

INLINE __m256i pairs_of(const int8_of_bf16 *at) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)); }

// A group's part of the sums, from its whole numbers.
INLINE void add_group(Floats (&sums)[SPAN], const Ints (&whole)[SPAN], float scale) {
    for (int s = 0; s < SPAN; s++)
        sums[s] = fma((Floats)_mm256_cvtepi32_ps((__m256i)whole[s]), splat(scale), sums[s]);
}

// As multiply_two, of one row and N panels.
template <int N>
__attribute__((noinline)) void multiply_beside(Floats (&sums)[N][1][SPAN], const Rounded &x, const char *at, long bytes,
                                               long depth) {
    constexpr long row_bytes = COLUMNS * 2;
    const int16_t *row = x.row(0);
    const float *scale = x.scales_of(0);
    const char *w = at, *ahead = at + AHEAD;
    for (long first = 0; first < depth; first += SHARED) {
        Ints whole[N][SPAN] = {};
        const long end = depth - first < SHARED ? depth : first + SHARED;
        for (long k = first; k < end; k += 2) {
            for (int n = 0; n < N; n++) __builtin_prefetch(ahead + n * bytes);
            ahead += row_bytes;
            if (ahead >= at + bytes) at += N * bytes, ahead += (N - 1) * bytes;  // its neighbours are read already
            const __m256i pair = _mm256_set1_epi32(read<int>(row + k));
            for (int n = 0; n < N; n++) {
                const auto *panel = (const int8_of_bf16 *)(w + n * bytes);
                for (int s = 0; s < SPAN; s++)
                    whole[n][s] += (Ints)_mm256_madd_epi16(pair, pairs_of(panel + 2 * W * s));
            }
            w += row_bytes;
        }
        for (int n = 0; n < N; n++) add_group(sums[n][0], whole[n], *scale);
        scale++;
    }
}

// to[] += the pair at `x` times those in b, and then times c alone; in assembler for what is said of load_part.
INLINE void accumulate_pairs(Ints (&to)[SPAN], const int16_t *x, __m256i b, __m256i c) {
    Ints a, product;
    asm volatile("vpbroadcastd %4, %2\n vpmaddwd %5, %2, %3\n vpaddd %3, %0, %0\n"
                 "vpmaddwd %6, %2, %2\n vpaddd %2, %1, %1"
                 : "+x"(to[0]), "+x"(to[1]), "=&x"(a), "=&x"(product)
                 : "m"(*(const int32_t *)x), "x"(b), "x"(c));
}
INLINE void accumulate_pairs(Ints &to, const int16_t *x, __m256i b) {
    Ints a;
    asm volatile("vpbroadcastd %2, %1\n vpmaddwd %3, %1, %1\n vpaddd %1, %0, %0"
                 : "+x"(to), "=&x"(a)
                 : "m"(*(const int32_t *)x), "x"(b));
}

// sums[r][s] += x[row + r] . columns s of `w`, from `first` on, as `multiply` does.
template <int R, class F>
__attribute__((noinline)) void multiply_whole(Floats (&sums)[R][SPAN], const Rounded &x, long row, long first,
                                              const int8_of_bf16 *w, long depth, F meanwhile) {
    const long apart = x.groups * SHARED;
    const int16_t *rows[2] = {x.row(row) + first, x.row(row) + first + 3 * apart};
    const float *scale = x.scales_of(row) + first / SHARED;
    for (; depth > 0; depth -= SHARED, scale++) {
        struct Tile {
            Ints at[R][SPAN];
        } tile = {};
        for (long left = depth < SHARED ? depth : SHARED; left > 0; left -= 2) {
            meanwhile();
            const __m256i one = pairs_of(w), two = pairs_of(w + 2 * W);
            for (int r = 0; r < R; r++) accumulate_pairs(tile.at[r], &rows[r / 3][r % 3 * apart], one, two);
            const __m256i three = pairs_of(w + 4 * W);
            for (int r = 0; r < R; r++) accumulate_pairs(tile.at[r][2], &rows[r / 3][r % 3 * apart], three);
            w += 2 * COLUMNS;
            for (auto &each : rows) {
                each += 2;
                asm("" : "+r"(each));
            }
        }
        for (int r = 0; r < R; r++) add_group(sums[r], tile.at[r], scale[r * x.groups]);
    }
}
#undef INLINE
#endif

}  // namespace
