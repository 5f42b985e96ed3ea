// Weights of four bits. GROUP of them, in a row's depth, have a step and a least in common: a weight is
// step * value + least, as a float, or rounded to bfloat16 where those are multiplied. Every way of multiplying
// makes the same number of it.
#pragma once
#include "vectors.h"
#include <vector>

namespace {

constexpr int COLUMNS = SPAN * W;  // of a panel, see products.h

// One group of every column of a panel. Eight weights to a word, the first in its lowest bits.
struct Group {
    bf16 step[COLUMNS], least[COLUMNS];
    uint32_t words[GROUP / 8][COLUMNS];
};
static_assert(sizeof(Group) == COLUMNS * sizeof(int4) && sizeof(int4) == sizeof(int4_of_bf16));

// `values` [n, depth], a byte each; `scales` [n, groups, 2]: steps and leasts, as bfloat16 has them.
inline void pack_groups(const uint8_t *values, const float *scales, long n, long depth, Group *to) {
    const long groups = up(depth, GROUP) / GROUP;
    for (long c = 0; c < n; c++)
        for (long g = 0; g < groups; g++) {
            put(&to[g].step[c], scales[(c * groups + g) * 2]);
            put(&to[g].least[c], scales[(c * groups + g) * 2 + 1]);
            for (long k = g * GROUP; k < depth && k < (g + 1) * GROUP; k++)
                to[g].words[k % GROUP / 8][c] |= (uint32_t)values[c * depth + k] << 4 * (k % 8);
        }
}

inline Floats weight(Words eight, int which, Floats step, Floats least) {
    return fma(__builtin_convertvector((Ints)(eight >> 4 * which & 15), Floats), step, least);
}

#if defined(__AVX512BF16__)
// Rounded, each first beside its second.
inline __m512bh pairs_of(Floats first, Floats second) {
    static const struct Beside {
        alignas(64) uint16_t at[2 * W];
        constexpr Beside() : at() {
            for (int i = 0; i < 2 * W; i++) at[i] = (uint16_t)(i / 2 + i % 2 * W);
        }
    } beside;
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_load_si512(beside.at), both);
}
#endif

// A panel as the same panel of what its weights are multiplied as. `meanwhile` is called for every eight rows of it.
template <class T, class F> const Act<T> *unpacked_groups(const T *panel, long depth, F meanwhile) {
    static thread_local std::vector<Act<T>> values;
    values.resize(depth * COLUMNS);
    Act<T> *to = values.data();
    for (const Group *group = (const Group *)panel; to < values.data() + depth * COLUMNS; group++)
        for (int j = 0; j < GROUP / 8; j++, to += 8 * COLUMNS) {
            meanwhile();
            for (int s = 0; s < SPAN; s++) {
                const Floats step = load(group->step + W * s), least = load(group->least + W * s);
                const Words eight = read<Words>(group->words[j] + W * s);
#if defined(__AVX512BF16__)
                if constexpr (PAIRED<T>) {
                    for (int i = 0; i < 8; i += 2)
                        write(to + i * COLUMNS + 2 * W * s,
                              pairs_of(weight(eight, i, step, least), weight(eight, i + 1, step, least)));
                    continue;
                }
#endif
                for (int i = 0; i < 8; i++) store(to + i * COLUMNS + W * s, weight(eight, i, step, least));
            }
        }
    return values.data();
}

// As `multiply`, of one row, by a panel as it is.
template <class T, class F>
__attribute__((noinline)) void multiply_groups(Floats (&sums)[1][SPAN], const Act<T> *x, const T *panel, long depth,
                                               F meanwhile) {
    struct Line {
        Floats at[SPAN];
    } line = (Line &)sums;
    for (const Group *group = (const Group *)panel; depth > 0; group++, depth -= GROUP) {
        Floats step[SPAN], least[SPAN];
        for (int s = 0; s < SPAN; s++) step[s] = load(group->step + W * s), least[s] = load(group->least + W * s);
        for (int j = 0; j < GROUP / 8; j++, x += 8) {
            meanwhile();
            Words eight[SPAN];
            for (int s = 0; s < SPAN; s++) eight[s] = read<Words>(group->words[j] + W * s);
#if defined(__AVX512BF16__)
            if constexpr (PAIRED<T>) {
                for (int i = 0; i < 8; i += 2)
                    for (int s = 0; s < SPAN; s++) {
                        const __m512bh b =
                            pairs_of(weight(eight[s], i, step[s], least[s]), weight(eight[s], i + 1, step[s], least[s]));
                        const __m512bh a = (__m512bh)_mm512_set1_epi32(read<int>(x + i));
                        line.at[s] = (Floats)_mm512_dpbf16_ps((__m512)line.at[s], a, b);
                    }
            }
#endif
            if constexpr (std::is_same_v<Act<T>, float>) {
                for (int i = 0; i < 8; i++)
                    for (int s = 0; s < SPAN; s++)
                        line.at[s] = fma(splat(x[i]), weight(eight[s], i, step[s], least[s]), line.at[s]);
            }
        }
    }
    (Line &)sums = line;
}

}  // namespace
