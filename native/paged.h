// Where a token's rows lie: address arithmetic over a layout and a block table, and the checks made at the boundary.
#pragma once

#include <algorithm>

#include "kvstrata.h"

namespace kvs {

struct Rows {
    char *key;
    char *value;
    int64_t count;  // rows from here that lie together: up to the end of the page or of the range
};

struct Paged {
    const uint64_t *addresses;
    int64_t segments, dim, itemsize, kv_heads, group, page_tokens, chunk_tokens;
    int64_t row_bytes, plane_bytes, head_bytes;

    Paged(const kvs_layout &layout, const uint64_t *table, int64_t table_segments)
        : addresses(table), segments(table_segments), dim(layout.head_dim), itemsize(layout.dtype == KVS_FLOAT32 ? 4 : 2),
          kv_heads(layout.kv_heads), group(layout.query_heads / layout.kv_heads), page_tokens(layout.page_tokens),
          chunk_tokens(layout.chunk_tokens), row_bytes(dim * itemsize), plane_bytes(page_tokens * row_bytes),
          head_bytes(chunk_tokens / page_tokens * 2 * plane_bytes) {}

    Rows rows(int64_t head, int64_t token, int64_t stop, int64_t most) const {
        int64_t inside = token % chunk_tokens, row = inside % page_tokens;
        char *page = reinterpret_cast<char *>(addresses[token / chunk_tokens]) + head * head_bytes +
                     inside / page_tokens * 2 * plane_bytes + row * row_bytes;
        return {page, page + plane_bytes, std::min({page_tokens - row, stop - token, most})};
    }

    kvs_status check_range(int64_t start, int64_t stop) const {
        if (start < 0 || stop < start || segments < 0 || stop > segments * chunk_tokens) return KVS_OUT_OF_RANGE;
        if (start == stop) return KVS_OK;
        if (!addresses) return KVS_NULL_POINTER;
        for (int64_t i = start / chunk_tokens; i <= (stop - 1) / chunk_tokens; i++)
            if (!addresses[i]) return KVS_NULL_POINTER;
        return KVS_OK;
    }
};

inline kvs_status check_layout(const kvs_layout *layout) {
    if (!layout) return KVS_NULL_POINTER;
    bool good = layout->dtype >= KVS_FLOAT32 && layout->dtype <= KVS_FLOAT16 && layout->kv_heads > 0 &&
                layout->query_heads > 0 && layout->query_heads % layout->kv_heads == 0 && layout->head_dim >= 8 &&
                layout->head_dim <= 256 && layout->head_dim % 8 == 0 && layout->page_tokens > 0 &&
                layout->chunk_tokens > 0 && layout->chunk_tokens % layout->page_tokens == 0;
    return good ? KVS_OK : KVS_BAD_LAYOUT;
}

}  // namespace kvs
