// Weights of four bits. GROUP of them, in a row's depth, have a step and a least in common: a weight is
// step * value + least. So a group's part of a product is step times the sum of x * value, and least times that of x.
//
// A value is not shifted to the lowest bits, but masked where it lies in its word and made a float as it is: the
// activation beside it is scaled by the power of two that is too much, which rounds nothing.
#pragma once
#include "vectors.h"
#include <vector>

namespace {

constexpr int COLUMNS = SPAN * W;  // of a panel, see products.h
constexpr int EIGHT = 8;           // values in a word, the first in its lowest bits

// One group of every column of a panel.
struct Group {
    bf16 step[COLUMNS], least[COLUMNS];
    uint32_t words[GROUP / EIGHT][COLUMNS];
};
static_assert(sizeof(Group) == COLUMNS * sizeof(int4));

// `values` [n, depth], a byte each; `scales` [n, groups, 2]: steps and leasts, as bfloat16 has them.
inline void pack_groups(const uint8_t *values, const float *scales, long n, long depth, Group *to) {
    const long groups = up(depth, GROUP) / GROUP;
    for (long c = 0; c < n; c++)
        for (long g = 0; g < groups; g++) {
            put(&to[g].step[c], scales[(c * groups + g) * 2]);
            put(&to[g].least[c], scales[(c * groups + g) * 2 + 1]);
            for (long k = g * GROUP; k < depth && k < (g + 1) * GROUP; k++)
                to[g].words[k % GROUP / EIGHT][c] |= (uint32_t)values[c * depth + k] << 4 * (k % EIGHT);
        }
}

// Activations as int4 weights are multiplied with, and the sum of each group of them.
class Scaled {
  public:
    // The padding of `x` up to a whole group must be zero.
    Scaled(const float *x, long apart, long rows, long depth) : depth(up(depth, GROUP)) {
        static thread_local std::vector<float> values, sums;
        values.resize(rows * this->depth), sums.resize(rows * this->depth / GROUP);
        float *to = values.data(), *sum_to = sums.data();
        for (const float *end = x + rows * apart; x < end; x += apart)
            for (long k = 0; k < this->depth; k += GROUP, to += GROUP) {
                Floats all = {};
                for (int i = 0; i < GROUP; i += W) {
                    all += load(x + k + i);
                    store(to + i, load(x + k + i) * load(LESS + i % EIGHT));
                }
                *sum_to++ = sum(all);
            }
        x_ = values.data(), sums_ = sums.data();
    }
    const float *row(long r) const { return x_ + r * depth; }
    const float *sums_of(long r) const { return sums_ + r * (depth / GROUP); }
    const long depth;

  private:
    static constexpr float LESS[2 * EIGHT] = {1,           0x1p-4f,  0x1p-8f,  0x1p-12f, 0x1p-16f, 0x1p-20f,
                                              0x1p-24f,    1,        1,        0x1p-4f,  0x1p-8f,  0x1p-12f,
                                              0x1p-16f,    0x1p-20f, 0x1p-24f, 1};
    const float *x_, *sums_;
};

// Value `which` of each of W words is what these leave of it, times the power of two of its place; but the last one,
// whose place is the sign's, is shifted.
alignas(64) constexpr struct Masks {
    uint32_t at[EIGHT][W];
    constexpr Masks() : at() {
        for (int i = 0; i < EIGHT; i++)
            for (int j = 0; j < W; j++) at[i][j] = 0xfu << 4 * i;
    }
} masks;

#if defined(__AVX2__) && !defined(__AVX512F__)
#define INLINE inline __attribute__((always_inline))  // in assembler for what is said of load_part
INLINE Floats value(const uint32_t *words, int which) {
    const __m256i_u &eight = *(const __m256i_u *)words;
    Floats x;
    if (which == EIGHT - 1)
        asm volatile("vmovdqu %1, %0\n vpsrld $28, %0, %0\n vcvtdq2ps %0, %0" : "=x"(x) : "m"(eight));
    else
        asm volatile("vmovdqu %1, %0\n vpand %2, %0, %0\n vcvtdq2ps %0, %0"
                     : "=x"(x)
                     : "m"(eight), "m"(*(const __m256i *)masks.at[which]));
    return x;
}
// one += *x times the values `which` of `first`, two += *y times those of `second`.
INLINE void accumulate_values(Floats (&one)[SPAN], Floats (&two)[SPAN], const float *x, const float *y,
                              const Words (&first)[SPAN], const Words (&second)[SPAN], int which) {
    Floats a, value;
    Words mask;
    asm volatile("vmovdqa %1, %0" : "=x"(mask) : "m"(*(const __m256i *)masks.at[which]));
    auto add = [&](Floats &to, const Words &eight) {
        if (which == EIGHT - 1)
            asm volatile("vpsrld $28, %2, %1\n vcvtdq2ps %1, %1\n vfmadd231ps %1, %3, %0"
                         : "+x"(to), "=&x"(value)
                         : "x"(eight), "x"(a));
        else
            asm volatile("vpand %2, %3, %1\n vcvtdq2ps %1, %1\n vfmadd231ps %1, %4, %0"
                         : "+x"(to), "=&x"(value)
                         : "x"(eight), "x"(mask), "x"(a));
    };
    asm volatile("vbroadcastss %1, %0" : "=x"(a) : "m"(*x));
    for (int s = 0; s < SPAN; s++) add(one[s], first[s]);
    asm volatile("vbroadcastss %1, %0" : "=x"(a) : "m"(*y));
    for (int s = 0; s < SPAN; s++) add(two[s], second[s]);
}
#undef INLINE
#else
inline Floats value(Words eight, int which) {
    const Words left = which == EIGHT - 1 ? eight >> 28 : eight & read<Words>(masks.at[which]);
    return __builtin_convertvector((Ints)left, Floats);
}
inline Floats value(const uint32_t *words, int which) { return value(read<Words>(words), which); }
inline void accumulate_values(Floats (&one)[SPAN], Floats (&two)[SPAN], const float *x, const float *y,
                              const Words (&first)[SPAN], const Words (&second)[SPAN], int which) {
    for (int s = 0; s < SPAN; s++) {
        one[s] = fma(splat(*x), value(first[s], which), one[s]);
        two[s] = fma(splat(*y), value(second[s], which), two[s]);
    }
}
#endif

// sums[r][s] += x[row + r] . columns s of `groups`, the `first` of x and those behind it, half a group at a time. `meanwhile` is called for every eight values.
template <int R, class F>
__attribute__((noinline)) void multiply_groups(Floats (&sums)[R][SPAN], const Scaled &x, long row, long first,
                                               const Group *group, long groups, F meanwhile) {
    constexpr int HALF = GROUP / EIGHT / 2;  // words
    const float *from = x.row(row) + first * GROUP, *totals = x.sums_of(row) + first;
    for (const Group *end = group + groups; group < end; group++, from += GROUP, totals++) {
        auto add = [&](const Floats(&acc)[R][SPAN]) {
            for (int s = 0; s < SPAN; s++) {
                const Floats step = load(group->step + W * s);
                for (int r = 0; r < R; r++) sums[r][s] = fma(step, acc[r][s], sums[r][s]);
            }
        };
        if constexpr (R == 1) {  // both halves at once: one sum alone would wait for itself
            Floats one[1][SPAN] = {}, two[1][SPAN] = {};
            for (int j = 0; j < HALF; j++) {
                meanwhile(), meanwhile();
                Words first[SPAN], second[SPAN];
                for (int s = 0; s < SPAN; s++) {
                    first[s] = read<Words>(group->words[j] + W * s);
                    second[s] = read<Words>(group->words[j + HALF] + W * s);
                }
                const float *x = from + j * EIGHT, *y = x + HALF * EIGHT;
                for (int i = 0; i < EIGHT; i++) accumulate_values(one[0], two[0], x + i, y + i, first, second, i);
            }
            add(one), add(two);
        } else {
            for (int half = 0; half < 2; half++) {
                struct Tile {
                    Floats at[R][SPAN];
                } tile = {};
                for (int j = half * HALF; j < (half + 1) * HALF; j++) {
                    meanwhile();
                    for (int i = 0; i < EIGHT; i++) {
                        Floats b[SPAN];
                        for (int s = 0; s < SPAN; s++) b[s] = value(group->words[j] + W * s, i);
                        for (int r = 0; r < R; r++) accumulate(tile.at[r], from + r * x.depth + j * EIGHT + i, b);
                    }
                }
                add(tile.at);
            }
        }
        for (int s = 0; s < SPAN; s++) {
            const Floats least = load(group->least + W * s);
            for (int r = 0; r < R; r++)
                sums[r][s] = fma(least, splat(totals[r * (x.depth / GROUP)]), sums[r][s]);
        }
    }
}

}  // namespace
