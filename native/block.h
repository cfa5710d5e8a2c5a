// Attention of a group of query heads over one block of at most 64 rows that lie together: scores, softmax step, values.
// A group is worked through in tiles of up to four heads, so that a row is widened to fp32 once for the whole tile.
#pragma once

#include <cmath>

#include "simd.h"

namespace kvs {

constexpr int kBlock = 64;  // rows per block; also the stride of the score buffer

// Rows scored together: as many accumulators as the registers hold beside the query and one widened row.
template <int TILE> constexpr int kRowsTogether = (TILE == 4 && kRegisters < 32) ? 2 : 4;

// Vectors of columns summed together: enough independent sums to hide the latency of a multiply-add, few enough that none
// of them leaves the registers.
template <int TILE> constexpr int kColumnsTogether = kRegisters < 32 ? (TILE == 1 ? 8 : TILE == 2 ? 4 : TILE == 3 ? 3 : 2)
                                                                     : (TILE == 1 ? 8 : 4);

// Starts loading rows that a later pass reads; the hardware follows a plane but not the step from one segment to the next.
struct Ahead {
    const char *at = nullptr;
    int64_t bytes = 0;
    KVS_INLINE void touch(int64_t from, int64_t length) const {
        for (int64_t i = from; i < from + length && i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    }
};

template <class E, int TILE>
void score_tile(const float *query, const typename E::Stored *key, int dim, int rows, const Ahead &ahead, float *scores) {
    constexpr int W = kWidth, R = kRowsTogether<TILE>;
    const int64_t step = int64_t(dim) * sizeof(typename E::Stored);
    for (int row = 0; row < rows; row += R) {
        ahead.touch(row * step, R * step);
        const typename E::Stored *k[R];
        F<W> acc[TILE][R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            k[r] = key + int64_t(row + r < rows ? row + r : rows - 1) * dim;
#pragma GCC unroll 4
            for (int g = 0; g < TILE; g++) acc[g][r] = F<W>{};
        }
        int c = 0;
        for (; c + W <= dim; c += W) {
            F<W> q[TILE];
#pragma GCC unroll 4
            for (int g = 0; g < TILE; g++) q[g] = load<W>(query + g * dim + c);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                F<W> x = E::template load<W>(k[r] + c);
#pragma GCC unroll 4
                for (int g = 0; g < TILE; g++) acc[g][r] += q[g] * x;
            }
        }
        if constexpr (W > 8) {
            if (c < dim) {
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    F<W> x = load_half<E, W>(k[r] + c);
#pragma GCC unroll 4
                    for (int g = 0; g < TILE; g++) acc[g][r] += load_half<Float32, W>(query + g * dim + c) * x;
                }
            }
        }
        if constexpr (R == 4) {
#pragma GCC unroll 4
            for (int g = 0; g < TILE; g++)
                store<4>(scores + g * kBlock + row, sum4<W>(acc[g][0], acc[g][1], acc[g][2], acc[g][3]));
        } else {
#pragma GCC unroll 4
            for (int g = 0; g < TILE; g += 2) {
                F<4> s = sum4<W>(acc[g][0], acc[g][1], acc[g + 1][0], acc[g + 1][1]);
                std::memcpy(scores + g * kBlock + row, &s, 8);
                std::memcpy(scores + (g + 1) * kBlock + row, reinterpret_cast<const char *>(&s) + 8, 8);
            }
        }
    }
}

// Turns one head's scores into weights relative to the running maximum `m`, updates `m` and `l`, and returns the factor
// that brings what was accumulated before onto the new maximum (Milakov and Gimelshein 2018, online softmax).
inline float softmax_step(float *scores, int rows, float scale, float &m, float &l) {
    constexpr int W = kWidth;
    const int whole = rows / W * W, padded = (rows + W - 1) / W * W;
    F<W> top = broadcast<W>(-INFINITY);
    for (int i = 0; i < whole; i += W) {
        F<W> x = load<W>(scores + i) * scale;
        store<W>(scores + i, x);
        top = maximum<W>(x, top);
    }
    if (whole < padded) {
        for (int i = whole; i < padded; i++) scores[i] = i < rows ? scores[i] * scale : -INFINITY;
        top = maximum<W>(load<W>(scores + whole), top);
    }
    const float before = m, highest = largest<W>(top);
    m = highest > before ? highest : before;
    const float base = m == -INFINITY ? 0.0f : m;  // all scores -inf: weights of zero, not NaN
    F<W> total = {};
    for (int i = 0; i < padded; i += W) {
        F<W> w = exp_nonpositive<W>(load<W>(scores + i) - base);
        store<W>(scores + i, w);
        total += w;
    }
    const float factor = exp_nonpositive(before - base);
    l = l * factor + sum<W>(total);
    return factor;
}

template <class E, int W, int TILE, int COLUMNS>
KVS_INLINE void value_columns(const float *weights, const typename E::Stored *value, int dim, int rows, int column,
                              const float *factor, float *u) {
    F<W> acc[TILE][COLUMNS];
#pragma GCC unroll 4
    for (int g = 0; g < TILE; g++)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) acc[g][c] = F<W>{};
    for (int row = 0; row < rows; row++) {
        const typename E::Stored *v = value + int64_t(row) * dim + column;
        F<W> p[TILE];
#pragma GCC unroll 4
        for (int g = 0; g < TILE; g++) p[g] = broadcast<W>(weights[g * kBlock + row]);
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) {
            F<W> x = E::template load<W>(v + c * W);
#pragma GCC unroll 4
            for (int g = 0; g < TILE; g++) acc[g][c] += p[g] * x;
        }
    }
    // The block is summed from zero before it joins the running sum: pairwise-like, which keeps fp32 error low.
#pragma GCC unroll 4
    for (int g = 0; g < TILE; g++)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) {
            float *to = u + g * dim + column + c * W;
            store<W>(to, load<W>(to) * factor[g] + acc[g][c]);
        }
}

template <class E, int TILE>
void value_tile(const float *weights, const typename E::Stored *value, int dim, int rows, const float *factor, float *u) {
    constexpr int W = kWidth;
    constexpr int kMost = kColumnsTogether<TILE>;
    int column = 0;
    for (; column + kMost * W <= dim; column += kMost * W)
        value_columns<E, W, TILE, kMost>(weights, value, dim, rows, column, factor, u);
    if constexpr (kMost > 2)
        for (; column + 2 * W <= dim; column += 2 * W)
            value_columns<E, W, TILE, 2>(weights, value, dim, rows, column, factor, u);
    for (; column + W <= dim; column += W)
        value_columns<E, W, TILE, 1>(weights, value, dim, rows, column, factor, u);
    if constexpr (W > 8)
        if (column < dim) value_columns<E, 8, TILE, 1>(weights, value, dim, rows, column, factor, u);
}

// Calls tile(first head, std::integral_constant of the tile's size) until the group is covered.
template <class Tile> KVS_INLINE void for_tiles(int group, Tile tile) {
    int g = 0;
    for (; g + 4 <= group; g += 4) tile(g, std::integral_constant<int, 4>{});
    if (group - g == 3) tile(g, std::integral_constant<int, 3>{});
    if (group - g == 2) tile(g, std::integral_constant<int, 2>{});
    if (group - g == 1) tile(g, std::integral_constant<int, 1>{});
}

}  // namespace kvs
