// Matrix products with packed weights. A matrix [n, depth] is cut into panels of COLUMNS rows of it, which are the
// columns of the result; a panel is [depth / UNIT][COLUMNS][UNIT] values (int4: as in int4.h), then COLUMNS scales and
// COLUMNS biases.
#pragma once
#include "int8.h"

namespace {

struct Matrix {
    const char *panels;
    long n, depth;
};

template <class T> long panel_bytes(long depth) {
    return up(depth, UNIT<T>) / EACH<T> * COLUMNS * (long)sizeof(T) + 2 * COLUMNS * (long)sizeof(float);
}
template <class T> long packed_bytes(long n, long depth) { return up(n, COLUMNS) / COLUMNS * panel_bytes<T>(depth); }

// `matrix` is row-major [n, depth], of int4 a byte each; scale and bias [n] may be null: 1 and 0. An int4 matrix has
// scales of its groups: see pack_groups.
template <class T> void pack(const T *matrix, const float *scale, const float *bias, long n, long depth, char *to) {
    constexpr int U = UNIT<T>;
    memset(to, 0, packed_bytes<T>(n, depth));
    for (long first = 0; first < n; first += COLUMNS, to += panel_bytes<T>(depth)) {
        const long here = n - first < COLUMNS ? n - first : COLUMNS;
        T *values = (T *)to;
        float *scales = (float *)(values + up(depth, U) / EACH<T> * COLUMNS), *biases = scales + COLUMNS;
        if constexpr (GROUPED<T>)
            pack_groups((const uint8_t *)matrix + first * depth, scale + first * (up(depth, U) / U) * 2, here, depth,
                        (Group *)to);
        for (long c = 0; c < here; c++) {
            if constexpr (!GROUPED<T>) {
                const T *row = matrix + (first + c) * depth;
                for (long k = 0; k < depth; k++) values[k / U * U * COLUMNS + c * U + k % U] = row[k];
            }
            scales[c] = scale && !GROUPED<T> ? scale[first + c] : 1;
            biases[c] = bias ? bias[first + c] : 0;
        }
    }
}

// sums[r][s] += x[r] . columns s of `w`, whose rows are `across` columns apart. `meanwhile` is called at every k-step:
// there it is that memory is told what will be wanted. Not inlined: accumulators,
// and nothing of the caller, have the registers.
template <int R, int S, class T, class F>
__attribute__((noinline)) void multiply(Floats (&sums)[R][S], const Act<T> *x, long apart, const T *w, long across,
                                        long depth, F meanwhile) {
    struct Tile {
        Floats at[R][S];
    } tile = (Tile &)sums;  // copied as a structure: after a memcpy of theirs the compiler may leave sums in memory
    auto &acc = tile.at;
    // Rows by three pointers and one distance: what an address can be made of without a register for each row.
    const Act<T> *rows[3] = {x, x + 3 * apart, x + 6 * apart};
    for (long k = 0; k < depth; k += UNIT<T>) {
        meanwhile();
#if defined(__AVX512BF16__)
        if constexpr (PAIRED<T>) {
            __m512bh b[S];
            for (int s = 0; s < S; s++) b[s] = load_pairs(w + 2 * W * s);
            for (int r = 0; r < R; r++) {
                __m512bh a = (__m512bh)_mm512_set1_epi32(read<int>(rows[r / 3] + r % 3 * apart));
                for (int s = 0; s < S; s++) acc[r][s] = (Floats)_mm512_dpbf16_ps((__m512)acc[r][s], a, b[s]);
            }
        }
#endif
        if constexpr (std::is_same_v<Act<T>, float>) {
            for (int part = 0; part < UNIT<T>; part++) {
                Floats b[S];
                for (int s = 0; s < S; s++) b[s] = load_part(w + UNIT<T> * W * s, part);
                for (int r = 0; r < R; r++) accumulate(acc[r], &rows[r / 3][r % 3 * apart + part], b);
            }
        }
        w += UNIT<T> * across;
        for (auto &row : rows) {
            row += UNIT<T>;
            asm("" : "+r"(row));  // else the compiler makes a pointer for each row again
        }
    }
    (Tile &)sums = tile;
}

// Calls f with the constant `rows`, 1 to ROWS.
template <int R = ROWS, class F> inline void with_rows(long rows, F f) {
    if constexpr (R > 1) {
        if (rows < R) return with_rows<R - 1>(rows, f);
    }
    f(std::integral_constant<int, R>{});
}

// A panel of int8 as the same panel of bfloat16, in which later tiles of rows find it. Other panels stay what they are.
template <class T> const auto *unpacked(const T *panel, long depth) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, int8_of_bf16>) {
        static thread_local std::vector<bf16> values;
        values.resize(depth * COLUMNS);
        for (long i = 0; i < depth * COLUMNS; i += 2 * W) write(&values[i], load_pairs(panel + i));
        return (const bf16 *)values.data();
    } else
#endif
        return panel;
}

// Where a core's caches are small, a product is cut: so many rows, whose activations stay in the second-level cache, and
// so much of a panel, which stays in the first, while sums wait in memory. Elsewhere it is not.
constexpr long TALL = HALVED ? 48 : INT32_MAX, DEEP = HALVED ? 576 : INT32_MAX;
constexpr long WAITING = HALVED ? TALL / ROWS : 1;  // tiles

// Cache lines from `at` on, of which each call asks for the next; the last is asked for again, which costs nothing.
struct Lines {
    const char *at, *last;
    inline __attribute__((always_inline)) void operator()() {
        __builtin_prefetch(at, 0, 2);
        at += at < last ? 64 : 0;
    }
};

// As vectors: what a compiler makes of a memset of this size takes as long as a tenth of a tile's product.
template <int R> inline void clear(Floats (&sums)[R][SPAN]) {
    for (auto &row : sums)
        for (auto &sum : row) {
            sum = Floats{};
            asm("" ::: "memory");
        }
}

// Rows first to end of a panel's result from their sums.
template <int R>
void finish(const Floats (&sums)[R][SPAN], const float *scales, long here, float *out, long outs, bool add) {
    const float *biases = scales + COLUMNS;
    for (int r = 0; r < R; r++, out += outs) {
        float edge[COLUMNS];
        float *row = here == COLUMNS ? out : edge;
        if (add && row == edge) memcpy(edge, out, here * sizeof(float));
        for (int s = 0; s < SPAN; s++) {
            Floats y = fma(sums[r][s], load(scales + W * s), load(biases + W * s));
            store(row + W * s, add ? load(row + W * s) + y : y);
        }
        if (row == edge) memcpy(out, edge, here * sizeof(float));
    }
}

// Activations in the form that T wants beside the plain one.
template <class T> auto activations(const Act<T> *x, long apart, long rows, long depth) {
    if constexpr (GROUPED<T>)
        return Scaled(x, apart, rows, depth);
    else if constexpr (WHOLE<T>)
        return Rounded(x, apart, rows, depth);
    else
        return nullptr;
}

// As `multiply`, of one row and two panels, `bytes` apart: the sums of one alone would wait for themselves.
template <class T>
__attribute__((noinline)) void multiply_two(Floats (&sums)[2][1][SPAN], const float *x, const char *at, long bytes,
                                            long depth) {
    constexpr long row_bytes = COLUMNS * UNIT<T> * (long)sizeof(T);
    Floats one[SPAN], two[SPAN];
    for (int s = 0; s < SPAN; s++) one[s] = sums[0][0][s], two[s] = sums[1][0][s];
    const T *w = (const T *)at, *beside = (const T *)(at + bytes);
    const char *ahead = at + AHEAD;
    for (long k = 0; k < depth; k += UNIT<T>) {
        for (long i = 0; i < row_bytes; i += 64) __builtin_prefetch(ahead + i), __builtin_prefetch(ahead + bytes + i);
        ahead += row_bytes;
        if (ahead >= at + bytes) at += 2 * bytes, ahead += bytes;  // behind a panel is its neighbour, read already
        for (int part = 0; part < UNIT<T>; part++) {
            Floats b[SPAN];
            for (int s = 0; s < SPAN; s++) b[s] = load_part(w + UNIT<T> * W * s, part);
            accumulate(one, x + k + part, b);
            for (int s = 0; s < SPAN; s++) b[s] = load_part(beside + UNIT<T> * W * s, part);
            accumulate(two, x + k + part, b);
        }
        w += UNIT<T> * COLUMNS, beside += UNIT<T> * COLUMNS;
    }
    for (int s = 0; s < SPAN; s++) sums[0][0][s] = one[s], sums[1][0][s] = two[s];
}

// As product, of at most TALL rows.
template <class T>
void rows_product(const Act<T> *x, long apart, long rows, const Matrix &m, float *out, long outs, bool add, int part,
                  int parts) {
    const long panels = up(m.n, COLUMNS) / COLUMNS, bytes = panel_bytes<T>(m.depth), depth = up(m.depth, UNIT<T>);
    constexpr long row_bytes = COLUMNS * UNIT<T> / EACH<T> * (long)sizeof(T);
    const long tiles = up(rows, ROWS) / ROWS;
    const long stride = tiles > 1 ? up(row_bytes, tiles - 1) / (tiles - 1) : 0;
    const int lines = (int)(up(stride, 64) / 64);
    const long cuts = rows > ROWS ? up(depth, DEEP) / DEEP : 1, deep = up(up(depth, cuts) / cuts, CUT<T>);
    const long share = up(up(bytes, tiles * cuts) / (tiles * cuts), 64);  // of the next panel, for each call
    Floats waiting[WAITING][ROWS][SPAN];
    const auto scaled = activations<T>(x, apart, rows, m.depth);
    for (long panel = panels * part / parts; panel < panels * (part + 1) / parts; panel++) {
        const char *at = m.panels + panel * bytes, *soon = at + bytes;
        const T *w = (const T *)at;
        const float *scales = (const float *)(w + depth / EACH<T> * COLUMNS);
        const long here = m.n - panel * COLUMNS < COLUMNS ? m.n - panel * COLUMNS : COLUMNS;
        if constexpr (std::is_same_v<Act<T>, float> && !GROUPED<T>) {
            constexpr long N = WHOLE<T> ? 3 : 2;
            if (rows == 1 && panel + N <= panels * (part + 1) / parts) {
                Floats sums[N][1][SPAN] = {};
                if constexpr (WHOLE<T>)
                    multiply_beside(sums, scaled, at, bytes, depth);
                else
                    multiply_two<T>(sums, x, at, bytes, depth);
                for (long i = 0; i < N; i++, panel += i < N, scales += bytes / (long)sizeof(float)) {
                    const long left = m.n - panel * COLUMNS;
                    finish(sums[i], scales, left < COLUMNS ? left : COLUMNS, out + panel * COLUMNS, outs, add);
                }
                continue;
            }
        }
        auto fetch = [ahead = at + AHEAD](long size) mutable {  // what soon comes from memory
            for (long i = 0; i < size; i += 64) __builtin_prefetch(ahead + i, 0, 3);
            ahead += size;
        };
        const auto *again = rows > ROWS ? unpacked(w, depth) : nullptr;
        for (long k = 0; k < depth; k += deep) {
            const long now = depth - k < deep ? depth - k : deep;
            for (long r0 = 0; r0 < rows; r0 += ROWS)
                with_rows(rows - r0, [&](auto count) {
                    constexpr int R = count;
                    auto &sums = (Floats(&)[R][SPAN])waiting[HALVED ? r0 / ROWS : 0];
                    const Act<T> *from = x + r0 * apart + k;
                    if (k == 0) clear(sums);
                    if constexpr (GROUPED<T>) {
                        const Group *groups = (const Group *)w + k / GROUP;
                        if (tiles == 1) {
                            auto eight = [fetch]() mutable { fetch(row_bytes * EIGHT / GROUP); };
                            multiply_groups(sums, scaled, r0, k / GROUP, groups, now / GROUP, eight);
                        } else {
                            const int lines = (int)up(share, 64 * now / EIGHT) / (64 * now / EIGHT);
                            auto next = [line = Lines{soon, soon + share - 64}, lines]() mutable {
                                for (int i = 0; i < lines; i++) line();
                            };
                            multiply_groups(sums, scaled, r0, k / GROUP, groups, now / GROUP, next);
                            soon += share;
                        }
                    } else if constexpr (WHOLE<T>) {
                        if (tiles == 1) {
                            auto pair = [fetch]() mutable { fetch(row_bytes); };
                            multiply_whole(sums, scaled, r0, k, w + k * COLUMNS, now, pair);
                        } else {
                            multiply_whole(sums, scaled, r0, k, w + k * COLUMNS, now, Lines{soon, soon + share - 64});
                            soon += share;
                        }
                    } else if (tiles == 1 || (!HALVED && r0 == 0)) {  // this panel comes from memory
                        multiply(sums, from, apart, w, COLUMNS, now, [fetch]() mutable { fetch(row_bytes); });
                    } else if constexpr (HALVED) {  // meanwhile, the next one does
                        multiply(sums, from, apart, w + k * COLUMNS, COLUMNS, now, Lines{soon, soon + share - 64});
                        soon += share;
                    } else {
                        multiply(sums, from, apart, again, COLUMNS, depth,
                                 [=, next = soon + (r0 / ROWS - 1) * stride * (depth / UNIT<T>)]() mutable {
                                     for (int i = 0; i < lines; i++) __builtin_prefetch(next + 64 * i, 0, 2);
                                     next += stride;
                                 });
                    }
                    if (k + now == depth)
                        finish(sums, scales, here, out + r0 * outs + panel * COLUMNS, outs, add);
                });
        }
    }
}

// out [rows, n] = x [rows, depth] times the matrix, times scale, plus bias; with `add`, added to out. Rows of `x` and
// `out` are `apart` and `outs` values apart. Threads share the panels.
template <class T>
void product(const Act<T> *x, long apart, long rows, const Matrix &m, float *out, long outs, bool add, int part,
             int parts) {
    for (long r = 0; r < rows; r += TALL)
        rows_product<T>(x + r * apart, apart, rows - r < TALL ? rows - r : TALL, m, out + r * outs, outs, add, part,
                        parts);
}

}  // namespace
