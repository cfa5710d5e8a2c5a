// Moving rows: into the pages, and out of them to contiguous buffers.
#include <cstring>

#include "paged.h"
#include "pool.h"
#include "simd.h"

namespace kvs {
namespace {

constexpr int64_t kAloneBytes = 1 << 20;
constexpr int64_t kGatherTokens = 1024;  // tokens per work item

void copy_rows(char *to, const char *from, int64_t rows, int64_t row_bytes, int64_t from_stride) {
    if (from_stride == row_bytes) {
        std::memcpy(to, from, size_t(rows * row_bytes));
        return;
    }
    for (int64_t i = 0; i < rows; i++) std::memcpy(to + i * row_bytes, from + i * from_stride, size_t(row_bytes));
}

template <class E> void widen(float *to, const char *from, int64_t count) {
    const auto *stored = reinterpret_cast<const typename E::Stored *>(from);
    constexpr int W = kWidth < 8 ? kWidth : 8;  // a row is a multiple of 8 elements
    for (int64_t i = 0; i < count; i += W) store<W>(to + i, E::template load<W>(stored + i));
}

void copy_out(int32_t dtype, bool as_float32, char *to, const char *from, int64_t count, int64_t itemsize) {
    if (!as_float32 || dtype == KVS_FLOAT32) std::memcpy(to, from, size_t(count * itemsize));
    else if (dtype == KVS_BFLOAT16) widen<Bfloat16>(reinterpret_cast<float *>(to), from, count);
    else widen<Float16>(reinterpret_cast<float *>(to), from, count);
}

}  // namespace
}  // namespace kvs

int32_t kvs_append(const kvs_layout *layout, const uint64_t *addresses, int64_t segments, int64_t start, int64_t rows,
                   const void *key, int64_t key_head_stride, int64_t key_row_stride, const void *value,
                   int64_t value_head_stride, int64_t value_row_stride) {
    if (kvs_status status = kvs::check_layout(layout)) return status;
    const kvs::Paged paged(*layout, addresses, segments);
    if (rows < 0) return KVS_OUT_OF_RANGE;
    if (kvs_status status = paged.check_range(start, start + rows)) return status;
    if (rows > 0 && (!key || !value)) return KVS_NULL_POINTER;
    const int64_t size = paged.itemsize;
    for (int64_t head = 0; head < paged.kv_heads; head++) {
        const char *k = static_cast<const char *>(key) + head * key_head_stride * size;
        const char *v = static_cast<const char *>(value) + head * value_head_stride * size;
        for (int64_t done = 0; done < rows;) {
            const kvs::Rows to = paged.rows(head, start + done, start + rows, rows);
            kvs::copy_rows(to.key, k + done * key_row_stride * size, to.count, paged.row_bytes, key_row_stride * size);
            kvs::copy_rows(to.value, v + done * value_row_stride * size, to.count, paged.row_bytes,
                           value_row_stride * size);
            done += to.count;
        }
    }
    return KVS_OK;
}

int32_t kvs_gather(const kvs_layout *layout, kvs_pool *pool, const uint64_t *addresses, int64_t segments, int64_t start,
                   int64_t stop, void *out_key, void *out_value, int64_t out_head_stride, int32_t as_float32) {
    if (kvs_status status = kvs::check_layout(layout)) return status;
    const kvs::Paged paged(*layout, addresses, segments);
    if (kvs_status status = paged.check_range(start, stop)) return status;
    if (start == stop) return KVS_OK;
    if (!out_key || !out_value) return KVS_NULL_POINTER;
    const int64_t parts = (stop - start + kvs::kGatherTokens - 1) / kvs::kGatherTokens;
    const int64_t out_size = as_float32 ? 4 : paged.itemsize;
    auto item = [&](int64_t index, int) {
        const int64_t head = index / parts;
        const int64_t from = start + index % parts * kvs::kGatherTokens, to = std::min(stop, from + kvs::kGatherTokens);
        for (int64_t token = from; token < to;) {
            const kvs::Rows here = paged.rows(head, token, to, kvs::kGatherTokens);
            const int64_t at = (head * out_head_stride + (token - start) * paged.dim) * out_size;
            const int64_t count = here.count * paged.dim;
            kvs::copy_out(layout->dtype, as_float32 != 0, static_cast<char *>(out_key) + at, here.key, count, paged.itemsize);
            kvs::copy_out(layout->dtype, as_float32 != 0, static_cast<char *>(out_value) + at, here.value, count,
                          paged.itemsize);
            token += here.count;
        }
    };
    const bool alone = (stop - start) * paged.kv_heads * 2 * paged.row_bytes < kvs::kAloneBytes;
    kvs::run(pool, alone, paged.kv_heads * parts, item);
    return KVS_OK;
}
