// One step of a decoder over packed weights and paged keys and values, behind a plain C interface.
// quiesce/engine/native/library.py mirrors the structures below; quiesce_abi() tells whether the two belong together.
#include "attention.h"
#include "seats.h"
#include "team.h"
#include <cmath>
#include <memory>
#include <new>

extern "C" {

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT8_OF_BF16 = 3, INT4 = 4 };

struct Layer {
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm;  // q_norm and k_norm: null where there are none
    const char *qkv, *out, *gate_up, *down;                    // packed
};

struct Model {
    int64_t hidden, inner, layers, heads, kv_heads, head_dim, vocab, page_size, threads;
    int32_t weights, cache;  // kinds; the embedding is of the cache's kind
    float eps;
    const Layer *layer;
    const float *norm, *cosines, *sines;  // rotary tables are [positions, head_dim / 2]
    const void *embedding;                // [vocab, hidden], row-major
    const char *head;                     // packed
};

}

namespace {

struct Stepper {
    virtual ~Stepper() = default;
    virtual void forward(const int32_t *tokens, const Row *rows, long row_count, const int64_t *needed,
                         const int32_t *pages, void *pool, float *hidden) = 0;
    virtual void logits(const float *hidden, long rows, float *out, long outs, float *peaks, Best *bests) = 0;
};

// T: weights, C: cache
template <class T, class C> struct StepOf : Stepper {
    using X = Act<T>;  // what weights are multiplied with
    using Q = Act<C>;  // what keys are multiplied with

    struct Token {
        int32_t id, page;
        long position, slot;
    };
    struct Tile {
        const Row *row;
        long first, token, count, to;  // `first` of the batch is the row's `token`-th, and attended at `to`
    };

    Model m;
    std::vector<Layer> layers;
    Team team;
    const long q_dim, kv_dim, group, qkv_dim;
    const Paging paging;
    std::vector<Attention<C>> attention;
    std::vector<Token> tokens;
    std::vector<Tile> tiles, last_tiles;
    std::vector<long> kept;  // tokens that the last layer computes beyond their keys and values
    std::vector<float> last_hidden;  // theirs
    std::vector<X> normed, attended, gated;
    std::vector<Q> queries;
    std::vector<float> wide;  // a product's result: qkv, or gate and up

    explicit StepOf(const Model &model)
        : m(model), layers(m.layer, m.layer + m.layers), team((int)m.threads), q_dim(m.heads * m.head_dim),
          kv_dim(m.kv_heads * m.head_dim), group(m.heads / m.kv_heads), qkv_dim(q_dim + 2 * kv_dim),
          paging{m.page_size, m.layers * 2 * m.page_size * kv_dim, 2 * m.page_size * kv_dim, kv_dim, m.head_dim},
          attention(m.threads, Attention<C>(paging, group)) {}

    static long padded(long width) { return up(width, 32) + 32; }  // vectors may run over the end of a row

    void forward(const int32_t *ids, const Row *rows, long row_count, const int64_t *needed, const int32_t *pages,
                 void *memory, float *hidden) override {
        plan(ids, rows, row_count, needed, pages);
        const long n = (long)tokens.size(), state_bytes = m.hidden * (long)sizeof(float);
        reserve(n);
        C *pool = (C *)memory;
        auto work = [&](int part) {
            embed(hidden, pool, part);
            team.meet();
            for (long number = 0; number < m.layers; number++) {
                const Layer &layer = layers[number];
                C *in_layer = pool + number * paging.layer;
                normalise(hidden, n, layer.attention_norm, part);
                times(normed, m.hidden, layer.qkv, qkv_dim, n, wide.data(), padded(qkv_dim), false, part);
                for (long t = n * part / team.size; t < n * (part + 1) / team.size; t++)
                    place(t, n, layer, in_layer);
                team.meet();
                if (number + 1 < m.layers || (long)kept.size() == n) {
                    attend(tiles, in_layer, pages, n, part);
                    after_attention(layer, n, hidden, part);
                } else {
                    for_kept(hidden, part, [&](float *state, float *last) { memcpy(last, state, state_bytes); });
                    attend(last_tiles, in_layer, pages, n, part);
                    after_attention(layer, (long)kept.size(), last_hidden.data(), part);
                    for_kept(hidden, part, [&](float *state, float *last) { memcpy(state, last, state_bytes); });
                }
            }
        };
        team.run(work);
    }

    void logits(const float *hidden, long n, float *out, long outs, float *peaks, Best *bests) override {
        reserve(n);
        std::vector<Best> found(n * team.size);
        auto work = [&](int part) {
            normalise(hidden, n, m.norm, part);
            team.meet();
            const Matrix head{m.head, m.vocab, m.hidden};
            product_and_peaks<T>(normed.data(), padded(m.hidden), n, head, out, outs, peaks, &found[n * part], part,
                                 team.size);
        };
        team.run(work);
        for (long r = 0; r < n; r++) {
            bests[r] = found[r];
            for (int part = 1; part < team.size; part++)
                if (bests[r].beaten_by(found[n * part + r].value)) bests[r] = found[n * part + r];
        }
    }

  private:
    // A product, after all have made their part of `x` and before any goes on.
    void times(const std::vector<X> &x, long depth, const char *packed, long columns, long n, float *out, long outs,
               bool add, int part) {
        team.meet();
        product<T>(x.data(), padded(depth), n, {packed, columns, depth}, out, outs, add, part, team.size);
        team.meet();
    }

    // Of a layer, what is computed of `n` tokens that have attended, in their states.
    void after_attention(const Layer &layer, long n, float *states, int part) {
        times(attended, q_dim, layer.out, m.hidden, n, states, m.hidden, true, part);
        normalise(states, n, layer.mlp_norm, part);
        times(normed, m.hidden, layer.gate_up, 2 * m.inner, n, wide.data(), padded(2 * m.inner), false, part);
        gate(n, part);
        times(gated, m.inner, layer.down, m.hidden, n, states, m.hidden, true, part);
    }

    // f(state, its place among those that the last layer computes) for each of those.
    template <class F> void for_kept(float *hidden, int part, F f) {
        for (long i = part; i < (long)kept.size(); i += team.size)
            f(hidden + kept[i] * m.hidden, &last_hidden[i * m.hidden]);
    }

    // `needed`: how many of each row's tokens, from its end, somebody wants the states of; null: all. The last layer is
    // computed for those, for of others nothing reads more of it than keys and values.
    void plan(const int32_t *ids, const Row *rows, long row_count, const int64_t *needed, const int32_t *pages) {
        tokens.clear(), tiles.clear(), last_tiles.clear(), kept.clear();
        for (const Row *row = rows; row < rows + row_count; row++) {
            const long first = (long)tokens.size(), spared = needed ? row->count - needed[row - rows] : 0;
            cut(row, first, 0, first, tiles);
            cut(row, first, spared, (long)kept.size(), last_tiles);
            for (long t = spared; t < row->count; t++) kept.push_back(first + t);
            for (long p = row->start; p < row->start + row->count; p++)
                tokens.push_back({*ids++, pages[row->table + p / m.page_size], p, p % m.page_size});
        }
    }

    // Tiles of a row that is the batch's from `first` on, from its token `t` on, which are attended at `to` and behind.
    void cut(const Row *row, long first, long t, long to, std::vector<Tile> &made) const {
        const long step = Attention<C>::tokens_at_once(group);
        for (; t < row->count; t += step, to += step)
            made.push_back({row, first + t, t, row->count - t < step ? row->count - t : step, to});
    }

    void reserve(long n) {
        auto grow = [](auto &buffer, long size) {
            if ((long)buffer.size() < size) buffer.resize(size);
        };
        grow(normed, n * padded(m.hidden));
        grow(attended, n * padded(q_dim));
        grow(gated, n * padded(m.inner));
        grow(queries, n * q_dim);
        grow(last_hidden, (long)kept.size() * m.hidden);
        grow(wide, n * padded(2 * m.inner > qkv_dim ? 2 * m.inner : qkv_dim));
    }

    // Also zeroes each page that is begun: nothing of an earlier owner, not even a NaN, is left in its free slots.
    void embed(float *hidden, C *pool, int part) {
        const long n = (long)tokens.size();
        for (long t = part; t < n; t += team.size) {
            const C *row = (const C *)m.embedding + tokens[t].id * m.hidden;
            for (long i = 0; i < m.hidden; i++) hidden[t * m.hidden + i] = widen(row[i]);
            if (tokens[t].slot == 0) memset(pool + paging.at(tokens[t].page, 0, 0), 0, paging.page * sizeof(C));
        }
    }

    // One over the root of the mean square.
    float scale_of(const float *x, long n) const {
        Floats squares = {};
        long i = 0;
        for (; i + W <= n; i += W) squares = fma(load(x + i), load(x + i), squares);
        float total = sum(squares);
        for (; i < n; i++) total += x[i] * x[i];
        return 1 / std::sqrt(total / (float)n + m.eps);
    }

    void normalise(const float *hidden, long n, const float *norm, int part) {
        for (long t = n * part / team.size; t < n * (part + 1) / team.size; t++) {
            const float *x = hidden + t * m.hidden;
            X *to = &normed[t * padded(m.hidden)];
            const float scale = scale_of(x, m.hidden);
            long i = 0;
            for (; i + W <= m.hidden; i += W) store(to + i, load(x + i) * splat(scale) * load(norm + i));
            for (; i < m.hidden; i++) put(to + i, x[i] * scale * norm[i]);
        }
    }

    // Normalises, where the model does, and rotates one head in place.
    void turn(float *head, const float *norm, long position) const {
        const long half = m.head_dim / 2;
        if (norm) {
            const float scale = scale_of(head, m.head_dim);
            for (long i = 0; i < m.head_dim; i++) head[i] = head[i] * scale * norm[i];
        }
        const float *c = m.cosines + position * half, *s = m.sines + position * half;
        for (long i = 0; i < half; i++) {
            const float a = head[i], b = head[i + half];
            head[i] = a * c[i] - b * s[i];
            head[i + half] = b * c[i] + a * s[i];
        }
    }

    // A token's queries go where attention reads them, its key and value to its slot.
    void place(long t, long n, const Layer &layer, C *in_layer) {
        const Token &token = tokens[t];
        float *qkv = &wide[t * padded(qkv_dim)];
        const float scale = (float)(1.4426950408889634 / std::sqrt((double)m.head_dim));  // as powers of two
        for (long h = 0; h < m.heads; h++) {
            float *q = qkv + h * m.head_dim;
            turn(q, layer.q_norm, token.position);
            Q *to = &queries[((h / group * n + t) * group + h % group) * m.head_dim];
            for (long i = 0; i < m.head_dim; i++) put(to + i, q[i] * scale);
        }
        for (long h = 0; h < m.kv_heads; h++) turn(qkv + q_dim + h * m.head_dim, layer.k_norm, token.position);
        C *k = in_layer + paging.at(token.page, 0, token.slot), *v = k + m.page_size * kv_dim;
        for (long i = 0; i < kv_dim; i++) put(k + i, qkv[q_dim + i]);
        for (long i = 0; i < kv_dim; i++) put(v + i, qkv[q_dim + kv_dim + i]);
    }

    // Threads share the tiles, or where those are few, each tile's heads.
    void attend(const std::vector<Tile> &tiles, const C *in_layer, const int32_t *pages, long n, int part) {
        const long heads = (long)tiles.size() < team.size ? 1 : m.kv_heads, shares = m.kv_heads / heads;
        const long tasks = (long)tiles.size() * shares;
        auto task = [&](long number) {
            const Tile &tile = tiles[number / shares];
            const long head = number % shares * heads;
            Task<C, X> made;
            made.queries = &queries[(head * n + tile.first) * group * m.head_dim];
            made.apart = n * group * m.head_dim;
            made.heads = heads, made.count = tile.count, made.group = group;
            made.start = tile.row->start + tile.token;
            made.pool = in_layer + head * m.head_dim;
            made.pages = pages + tile.row->table;
            made.out = &attended[tile.to * padded(q_dim) + head * group * m.head_dim];
            made.outs = padded(q_dim);
            return made;
        };
        for (long number = part; number < tasks; number += team.size) {
            const bool last = number + team.size >= tasks;
            const auto next = task(last ? number : number + team.size);
            attention[part].attend(task(number), last ? nullptr : &next);
        }
    }

    // silu(gate) * up
    void gate(long n, int part) {
        const Floats one = splat(1), log2e = splat(-1.4426950408889634f);
        for (long t = n * part / team.size; t < n * (part + 1) / team.size; t++) {
            const float *gates = &wide[t * padded(2 * m.inner)], *ups = gates + m.inner;
            X *to = &gated[t * padded(m.inner)];
            for (long i = 0; i < m.inner; i += W) {
                const Floats g = load(gates + i), y = g / (one + exp2(g * log2e)) * load(ups + i);
                if (i + W <= m.inner)
                    store(to + i, y);
                else  // what follows a row stays zero: int4 weights beside it need not be
                    for (long j = i; j < m.inner; j++) put(to + j, y[j - i]);
            }
        }
    }
};

template <class F> auto with_kind(int kind, F f) {
    if (kind == BFLOAT16) return f(bf16{});
    if (kind == INT8) return f(int8_t{});
    if (kind == INT8_OF_BF16) return f(int8_of_bf16{});
    if (kind == INT4) return f(int4{});
    return f(float{});
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Sizes of the structures above, so that a stale library is noticed.
API int64_t quiesce_abi() { return 5000000 + sizeof(Model) * 1000 + sizeof(Layer) + sizeof(Row) + sizeof(Seats); }

API int64_t quiesce_packed_bytes(int32_t kind, int64_t n, int64_t depth) {
    return with_kind(kind, [&](auto t) { return packed_bytes<decltype(t)>(n, depth); });
}

API void quiesce_pack(int32_t kind, const void *matrix, const float *scale, const float *bias, int64_t n,
                      int64_t depth, char *to) {
    with_kind(kind, [&](auto t) { pack((const decltype(t) *)matrix, scale, bias, n, depth, to); });
}

// For tests: out [rows, n] = x [rows, depth], float32, times a packed matrix.
API void quiesce_product(int32_t kind, const float *x, int64_t rows, const char *packed, int64_t n, int64_t depth,
                         float *out) {
    with_kind(kind, [&](auto t) {
        using T = decltype(t);
        const long apart = up(depth, UNIT<T>);
        std::vector<Act<T>> rounded(rows * apart);
        for (long r = 0; r < rows; r++)
            for (long k = 0; k < depth; k++) put(&rounded[r * apart + k], x[r * depth + k]);
        product<T>(rounded.data(), apart, rows, {packed, n, depth}, out, n, false, 0, 1);
    });
}

// Null: out of memory or threads.
API void *quiesce_open(const Model *model) {
    try {
        if (model->weights == FLOAT32) return new StepOf<float, float>(*model);
        if (model->weights == BFLOAT16) return new StepOf<bf16, bf16>(*model);
        if (model->weights == INT8_OF_BF16) return new StepOf<int8_of_bf16, bf16>(*model);
        if (model->weights == INT4 && model->cache == BFLOAT16) return new StepOf<int4, bf16>(*model);
        if (model->weights == INT4) return new StepOf<int4, float>(*model);
        return new StepOf<int8_t, float>(*model);
    } catch (const std::exception &) {
        return nullptr;
    }
}

API void quiesce_close(void *stepper) { delete (Stepper *)stepper; }

// Keys and values of all rows' tokens go to `pool`, hidden states to `hidden` [tokens, hidden]: those of the last
// `needed` of each row (null: of all), and of others something else. 0, or 1: no memory.
API int32_t quiesce_forward(void *stepper, const int32_t *tokens, const Row *rows, int64_t row_count,
                            const int64_t *needed, const int32_t *pages, void *pool, float *hidden) {
    try {
        ((Stepper *)stepper)->forward(tokens, rows, row_count, needed, pages, pool, hidden);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// out [rows, vocab], rows `outs` floats apart; peaks [rows, blocks of the vocabulary], bests [rows]. 0, or 1: no memory.
API int32_t quiesce_logits(void *stepper, const float *hidden, int64_t rows, float *out, int64_t outs, float *peaks,
                           Best *bests) {
    try {
        ((Stepper *)stepper)->logits(hidden, rows, out, outs, peaks, bests);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// What falls on the tokens at these positions, in [0, 1).
API void quiesce_chances(const uint64_t *seeds, const int64_t *positions, int64_t n, double *chances) {
    for (int64_t i = 0; i < n; i++) chances[i] = uniform(seeds[i], (uint64_t)positions[i]);
}

// Draws one token for each row of `logits` [rows, vocab]; `peaks` and `bests`: theirs, or null. 0, or 1: no memory.
API int32_t quiesce_draw(const float *logits, const float *peaks, const Best *bests, int64_t rows, int64_t vocab,
                         Wish *wishes) {
    static thread_local Sampler sampler;
    try {
        sampler.draw(logits, peaks, bests, rows, vocab, wishes);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// Whether every seat's token may be computed, and no two write one page, nor one of `others` [other_count].
API int32_t quiesce_sound(const Seats *seats, const Bounds *bounds, const int64_t *others, int64_t other_count) {
    static thread_local Marks marks;
    try {
        return marks.sound(*seats, *bounds, others, other_count);
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

// The chance of every seat that draws, then a token for each seat, to `tokens` too. 0; 1: no memory; 2: one is not finite.
API int32_t quiesce_draw_seats(const Seats *seats, const float *logits, const float *peaks, const Best *bests,
                               int64_t vocab, int64_t *tokens) {
    for (int64_t at = 0; at < seats->count; at++)
        if (seats->wishes[at].temperature > 0)
            seats->wishes[at].chance = uniform(seats->seeds[at], (uint64_t)seats->rows[at].start + 1);
    if (quiesce_draw(logits, peaks, bests, seats->count, vocab, seats->wishes)) return 1;
    bool sound = true;
    for (int64_t at = 0; at < seats->count; at++) {
        tokens[at] = seats->wishes[at].token;
        sound = sound && tokens[at] >= 0;
    }
    return sound ? 0 : 2;
}
