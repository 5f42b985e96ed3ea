// Attention over pages. A block of keys is laid out as a matrix product wants it, in scratch memory that stays in
// cache, and then met by all the queries of a tile that share the KV head. Softmax is kept as a running maximum and
// sum. Blocks start at fixed places, and a block that a query may not see changes none of its bits: what a query
// gives depends on its own keys alone, however it is batched.
#pragma once
#include "few.h"

namespace {

constexpr int TILE = 128;  // query rows, roughly: tokens times the query heads of a KV head

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
    std::vector<uint32_t> pairs;  // of dims of turned keys
    Expected expected;

    Attention(const Paging &paging, long group)
        : paging(paging), dim(paging.head_dim), wide(up(dim, ACROSS)), keys(dim * BLOCK), values(BLOCK * wide),
          weights(ROWS * ABREAST), scores(ROWS * ABREAST), best(paging.width / dim * (TILE + group)),
          total(best.size()), zeros(dim + 64), pairs(HALVED ? dim / 2 * ABREAST + ABREAST : 0) {
        sums.resize(best.size() * wide);
    }

    static long tokens_at_once(long group) { return group < TILE ? TILE / group : 1; }

    // `next`, if there is one, is what this thread will be given next.
    template <class O> void attend(const Task<C, O> &task, const Task<C, O> *next) {
        const long rows = task.count * task.group, all = rows * task.heads, end = task.end();
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (std::is_same_v<C, bf16>)
            if (rows <= 2 * ROWS && dim % (2 * W) == 0) return attend_few(task, next);
#endif
        std::fill(sums.begin(), sums.begin() + all * wide, 0.0f);
        std::fill(total.begin(), total.begin() + all, 0.0f);
        std::fill(best.begin(), best.begin() + all, -__builtin_inff());
        for (long first = 0; first < end; first += BLOCK)
            for (long head = 0; head < task.heads; head++) {
                if (head == 0) expected.clear();
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
#if defined(__AVX2__) && !defined(__AVX512F__)
    // As attend, of few rows: see few.h. Memory is asked for two blocks ahead, for a block is soon done.
    template <class O> void attend_few(const Task<C, O> &task, const Task<C, O> *next) {
        const long rows = task.count * task.group, all = rows * task.heads, end = task.end();
        std::fill(sums.begin(), sums.begin() + all * wide, 0.0f);
        std::fill(total.begin(), total.begin() + all, 0.0f);
        std::fill(best.begin(), best.begin() + all, -__builtin_inff());
        expected.trim();
        if (BLOCK < end) announce(task, BLOCK);
        for (long first = 0; first < end; first += BLOCK) {
            if (first + 2 * BLOCK < end)
                announce(task, first + 2 * BLOCK);
            else if (next && (first + BLOCK < end || end <= BLOCK))
                announce(*next, 0);
            for (long head = 0; head < task.heads; head++) {
                const long count = end - first < BLOCK ? end - first : BLOCK;
                const C *k[BLOCK], *v[BLOCK];
                turn(task.pool + head * dim, task.pages, first, count, k, v);
                for (long r0 = 0; r0 < rows; r0 += ROWS)
                    with_rows(rows - r0, [&](auto constant) {
                        constexpr int R = constant;
                        see_few<R>(task.queries + head * task.apart + r0 * dim, task.start + 1 - first, task.group, r0,
                                   head * rows + r0, count, v);
                    });
            }
        }
        for (long row = 0; row < all; row++) {
            const long head = row / rows, r = row % rows;
            O *to = task.out + r / task.group * task.outs + (head * task.group + r % task.group) * dim;
            const float whole = total[row];
            for (long d = 0; d < dim; d++)
                put(to + d, sums[row * wide + d / (2 * W) * 2 * W + d % 2 * W + d % (2 * W) / 2] / whole);
        }
    }

    // `count` keys from position `first` on, turned, and where they and their values lie.
    void turn(const C *pool, const int32_t *pages, long first, long count, const C **k, const C **v) {
        long i = 0;
        paging.walk(pool, pages, first, count, [&](const C *key) {
            k[i] = key, v[i] = key + paging.page_size * paging.width;
            i++;
        });
        for (; i % 8; i++) k[i] = zeros.data();
        for (long some = 0; some < i; some += 8)
            for (long d = 0; d < dim; d += 8) turn_pairs(k + some, d, pairs.data() + d / 2 * ABREAST + some);
    }

    // As see, of `count` keys; the first token sees `seen` of them.
    template <int R>
    void see_few(const float *queries, long seen, long group, long r0, long row, long count, const C *const *v) {
        constexpr int S = R == 3 ? 3 : R == 4 ? 2 : R == 2 ? 4 : 8;  // enough sums that none waits for itself
        const long most = seen + (r0 + R - 1) / group, here = most < count ? most : count;
        if (here <= 0) return;
        for (long c = 0; c < here; c += S * W) {
            Floats s[R][S] = {};
            score(s, queries, dim, pairs.data() + c, expected.take(dim / 2));
            for (int r = 0; r < R; r++)
                for (int i = 0; i < S; i++) store(&scores[r * ABREAST + c + W * i], s[r][i]);
        }
        float fade[R];
        for (int r = 0; r < R; r++)
            fade[r] = weigh(&scores[r * ABREAST], &weights[r * ABREAST], (float)(seen + (r0 + r) / group),
                            best[row + r], total[row + r]);
        auto add = [&](auto vectors, auto odd, long at) {
            constexpr int N = vectors;
            Floats s[R][N];
            float *to = &sums[row * wide + at * W];
            for (int r = 0; r < R; r++)
                for (int i = 0; i < N; i++) s[r][i] = load(to + r * wide + W * i) * splat(fade[r]);
            add_values<R, N, odd>(s, weights.data(), v, at / 2 * 2 * W, here, expected.take(here));
            for (int r = 0; r < R; r++)
                for (int i = 0; i < N; i++) store(to + r * wide + W * i, s[r][i]);
        };
        using std::integral_constant;
        const long vectors = dim / W;
        long at = 0;
        if constexpr (R == 3) {
            for (; at + 6 <= vectors; at += 6) {
                add(integral_constant<int, 3>{}, std::false_type{}, at);
                add(integral_constant<int, 3>{}, std::true_type{}, at + 3);
            }
        } else if constexpr (R < 3) {
            for (; at + 4 <= vectors; at += 4) add(integral_constant<int, 4>{}, std::false_type{}, at);
        }
        for (; at < vectors; at += 2) add(integral_constant<int, 2>{}, std::false_type{}, at);
    }

#endif

    // Rows r0.. of a head's, whose state is at `row`.., look at the block of keys that begins at `first`.
    template <int R> void see(const P *queries, long start, long group, long r0, long row, long first) {
        const long most = start + (r0 + R - 1) / group + 1 - first, here = most < BLOCK ? most : BLOCK;
        for (long c = 0; c < here; c += ACROSS) {
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
            multiply(s, weights.data(), BLOCK, values.data() + c * UNIT<P>, wide, up(here, UNIT<P>),
                     expected.take(BLOCK / UNIT<P>));
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++) store(to + r * wide + W * i, s[r][i]);
        }
    }

    // Scores to weights, those from `seen` on to 0. Returns what earlier blocks' sums are to be multiplied with.
    static __attribute__((noinline)) float weigh(const float *scores, P *weights, float seen, float &best,
                                                 float &total) {
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
