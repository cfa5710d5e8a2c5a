#include <cmath>
#include <exception>
#include <vector>

#include "block.h"
#include "paged.h"
#include "pool.h"

namespace kvs {
namespace {

// Below this many bytes of K and V, waking a thread costs more than it saves.
constexpr int64_t kAloneBytes = 1 << 20;

// Tokens per work item: a function of the range's length only, so that the sum is grouped alike on every machine.
int64_t tokens_per_item(int64_t tokens) {
    int64_t size = 512;
    while (tokens > 64 * size) size *= 2;
    return size;
}

struct State {
    float *m, *l, *u;
};

template <class E>
void attend_item(const Paged &paged, int64_t head, int64_t start, int64_t stop, const float *query, float scale,
                 float *scores, float *factor, State to) {
    const int group = int(paged.group), dim = int(paged.dim);
    std::fill_n(to.m, group, -INFINITY);
    std::fill_n(to.l, group, 0.0f);
    std::fill_n(to.u, group * dim, 0.0f);
    using Stored = typename E::Stored;
    for (int64_t token = start; token < stop;) {
        const Rows here = paged.rows(head, token, stop, kBlock);
        const int rows = int(here.count);
        const Stored *key = reinterpret_cast<const Stored *>(here.key);
        const Stored *value = reinterpret_cast<const Stored *>(here.value);
        token += rows;
        Ahead values{here.value, rows * paged.row_bytes};
        for_tiles(group, [&](int g, auto tile) {
            score_tile<E, tile.value>(query + g * dim, key, dim, rows, values, scores + g * kBlock);
            values.bytes = 0;
        });
        if (token < stop) {
            const Rows next = paged.rows(head, token, stop, kBlock);
            Ahead{next.key, next.count * paged.row_bytes}.touch(0, next.count * paged.row_bytes);
        }
        for (int g = 0; g < group; g++)
            factor[g] = softmax_step(scores + g * kBlock, rows, scale, to.m[g], to.l[g]);
        for_tiles(group, [&](int g, auto tile) {
            value_tile<E, tile.value>(scores + g * kBlock, value, dim, rows, factor + g, to.u + g * dim);
        });
    }
}

// Adds the state of `from` to `to`, head by head.
void merge_into(int64_t heads, int64_t dim, State to, const float *m, const float *l, const float *u) {
    for (int64_t h = 0; h < heads; h++) {
        const float top = to.m[h] > m[h] ? to.m[h] : m[h];
        const float base = top == -INFINITY ? 0.0f : top;
        const float old = exp_nonpositive(to.m[h] - base), add = exp_nonpositive(m[h] - base);
        to.m[h] = top;
        to.l[h] = to.l[h] * old + l[h] * add;
        float *sum = to.u + h * dim;
        const float *more = u + h * dim;
        for (int64_t i = 0; i < dim; i++) sum[i] = sum[i] * old + more[i] * add;
    }
}

// Normalised output of one head. A sink weighs in the denominator only; it may be the largest score.
template <class E>
void write_output(int64_t dim, float m, float l, const float *u, const float *sink, typename E::Stored *out) {
    float weight = 1.0f;
    if (sink) {
        const float top = *sink > m ? *sink : m;
        const float base = top == -INFINITY ? 0.0f : top;
        weight = exp_nonpositive(m - base);
        l = l * weight + exp_nonpositive(*sink - base);
    }
    for (int64_t i = 0; i < dim; i++) out[i] = E::narrow(l == 0.0f ? 0.0f : u[i] * weight / l);
}

template <class E>
void attend_all(const Paged &paged, kvs_pool *pool, int64_t start, int64_t stop, const void *query, float scale,
                const float *sinks, void *out, State result) {
    using Stored = typename E::Stored;
    const int64_t heads = paged.kv_heads * paged.group, dim = paged.dim, group = paged.group;
    const int64_t size = tokens_per_item(stop - start), first = start / size;
    const int64_t parts = start == stop ? 0 : (stop - 1) / size - first + 1;
    const int64_t part_floats = group * (dim + 2), worker_floats = group * (kBlock + 1);
    const int64_t result_floats = heads * (dim + 2);

    // Kept between calls of a thread: a decode step asks for the same size once per layer.
    thread_local std::vector<float> scratch;
    const int64_t needed = heads * dim + kvs_pool_threads(pool) * worker_floats + result_floats +
                           paged.kv_heads * parts * part_floats;
    if (int64_t(scratch.size()) < needed) scratch.resize(size_t(needed));
    float *wide_query = scratch.data();
    float *worker_space = wide_query + heads * dim;
    float *result_space = worker_space + kvs_pool_threads(pool) * worker_floats;
    float *part_space = result_space + result_floats;
    if (!result.m) result = {result_space, result_space + heads, result_space + 2 * heads};

    const Stored *narrow_query = static_cast<const Stored *>(query);
    for (int64_t i = 0; i < heads * dim; i += 8) {
        store<4>(wide_query + i, E::template load<4>(narrow_query + i));
        store<4>(wide_query + i + 4, E::template load<4>(narrow_query + i + 4));
    }

    auto part_state = [&](int64_t head, int64_t part) {
        float *at = part_space + (head * parts + part) * part_floats;
        return State{at, at + group, at + 2 * group};
    };
    auto item = [&](int64_t index, int worker) {
        const int64_t head = index / parts, part = index % parts;
        const int64_t from = std::max(start, (first + part) * size), to = std::min(stop, (first + part + 1) * size);
        float *scores = worker_space + worker * worker_floats;
        attend_item<E>(paged, head, from, to, wide_query + head * group * dim, scale, scores, scores + group * kBlock,
                       part_state(head, part));
    };
    const bool alone = (stop - start) * paged.kv_heads * 2 * paged.row_bytes < kAloneBytes;
    run(pool, alone, paged.kv_heads * parts, item);

    std::fill_n(result.m, heads, -INFINITY);
    std::fill_n(result.l, heads, 0.0f);
    std::fill_n(result.u, heads * dim, 0.0f);
    for (int64_t head = 0; head < paged.kv_heads; head++)
        for (int64_t part = 0; part < parts; part++) {
            const State from = part_state(head, part);
            const int64_t h = head * group;
            merge_into(group, dim, {result.m + h, result.l + h, result.u + h * dim}, from.m, from.l, from.u);
        }
    if (!out) return;
    Stored *narrow = static_cast<Stored *>(out);
    for (int64_t h = 0; h < heads; h++)
        write_output<E>(dim, result.m[h], result.l[h], result.u + h * dim, sinks ? sinks + h : nullptr, narrow + h * dim);
}

}  // namespace
}  // namespace kvs

int32_t kvs_attend(const kvs_layout *layout, kvs_pool *pool, const uint64_t *addresses, int64_t segments, int64_t start,
                   int64_t stop, const void *query, float scale, const float *sinks, void *out, float *m, float *l,
                   float *u) {
    if (kvs_status status = kvs::check_layout(layout)) return status;
    const kvs::Paged paged(*layout, addresses, segments);
    if (kvs_status status = paged.check_range(start, stop)) return status;
    const bool state = m && l && u;
    if (!query || (!state && (m || l || u)) || (!state && !out)) return KVS_NULL_POINTER;
    const auto attend = layout->dtype == KVS_FLOAT32    ? kvs::attend_all<kvs::Float32>
                        : layout->dtype == KVS_BFLOAT16 ? kvs::attend_all<kvs::Bfloat16>
                                                        : kvs::attend_all<kvs::Float16>;
    try {
        attend(paged, pool, start, stop, query, scale, sinks, out, {m, l, u});
    } catch (const std::exception &) {
        return KVS_NO_MEMORY;
    }
    return KVS_OK;
}

int32_t kvs_append_and_attend(const kvs_layout *layout, kvs_pool *pool, const uint64_t *addresses, int64_t segments,
                              int64_t start, int64_t position, const void *key, int64_t key_head_stride,
                              const void *value, int64_t value_head_stride, const void *query, float scale,
                              const float *sinks, void *out) {
    if (start < 0 || start > position) return KVS_OUT_OF_RANGE;
    if (int32_t status = kvs_append(layout, addresses, segments, position, 1, key, key_head_stride, 0, value,
                                    value_head_stride, 0))
        return status;
    return kvs_attend(layout, pool, addresses, segments, start, position + 1, query, scale, sinks, out, nullptr, nullptr,
                      nullptr);
}

int32_t kvs_merge(int64_t heads, int64_t head_dim, const float *m1, const float *l1, const float *u1, const float *m2,
                  const float *l2, const float *u2, float *m, float *l, float *u) {
    if (heads < 0 || head_dim < 0) return KVS_OUT_OF_RANGE;
    if (!m1 || !l1 || !u1 || !m2 || !l2 || !u2 || !m || !l || !u) return KVS_NULL_POINTER;
    for (int64_t h = 0; h < heads; h++) {
        const float top = m1[h] > m2[h] ? m1[h] : m2[h];
        const float base = top == -INFINITY ? 0.0f : top;
        const float w1 = kvs::exp_nonpositive(m1[h] - base), w2 = kvs::exp_nonpositive(m2[h] - base);
        m[h] = top;
        l[h] = l1[h] * w1 + l2[h] * w2;
        for (int64_t i = h * head_dim; i < (h + 1) * head_dim; i++) u[i] = u1[i] * w1 + u2[i] * w2;
    }
    return KVS_OK;
}
