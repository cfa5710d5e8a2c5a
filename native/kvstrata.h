// Plain C interface of the kvstrata CPU kernels. No PyTorch, no OpenMP; every buffer belongs to the caller.
//
// A history of one layer is a block table: the base addresses of its segments. Segment i holds tokens
// [i * chunk_tokens, (i + 1) * chunk_tokens), laid out [kv_head][page][K, V][page_tokens][head_dim].
// Results do not depend on the number of threads or on where the segments lie.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
#define KVS_API extern "C" __attribute__((visibility("default")))
#else
#define KVS_API extern __attribute__((visibility("default")))
#endif

#define KVS_ABI_VERSION 2

enum kvs_status {
    KVS_OK = 0,
    KVS_BAD_LAYOUT = 1,    // a field of kvs_layout is out of its range
    KVS_OUT_OF_RANGE = 2,  // tokens beyond the block table, or a range that ends before it starts
    KVS_NULL_POINTER = 3,  // a needed buffer or a used segment has no address
    KVS_NO_MEMORY = 4,
};

enum kvs_dtype { KVS_FLOAT32 = 0, KVS_BFLOAT16 = 1, KVS_FLOAT16 = 2 };

// Bits of kvs_cpu_levels().
enum kvs_level { KVS_LEVEL_PORTABLE = 1, KVS_LEVEL_AVX2 = 2, KVS_LEVEL_AVX512 = 4 };

typedef struct kvs_layout {
    int32_t dtype;         // enum kvs_dtype
    int32_t kv_heads;
    int32_t query_heads;   // a multiple of kv_heads; query head h reads K/V head h / (query_heads / kv_heads)
    int32_t head_dim;      // a multiple of 8, from 8 to 256
    int32_t page_tokens;
    int32_t chunk_tokens;  // a multiple of page_tokens
} kvs_layout;

typedef struct kvs_pool kvs_pool;

KVS_API int32_t kvs_abi_version(void);
KVS_API uint32_t kvs_cpu_levels(void);

// A pool of `threads` threads, the caller of each kernel counted as one. NULL when memory runs out. A NULL pool is
// accepted everywhere and means: run on the calling thread. In a forked child the pool also runs on the calling thread.
KVS_API kvs_pool *kvs_pool_create(int32_t threads);
KVS_API void kvs_pool_destroy(kvs_pool *pool);
KVS_API int32_t kvs_pool_threads(const kvs_pool *pool);

// Attention of one query row per head over tokens [start, stop). `query` is [query_heads][head_dim] in the cache dtype.
// `out` (cache dtype, normalised) and the partial state `m`, `l` [query_heads] and `u` [query_heads][head_dim] (fp32,
// unnormalised) are each optional; m, l and u come together. An empty range gives m = -inf, l = 0, u = 0 and out = 0.
// `sinks`, [query_heads] or NULL, is one more score per head whose value is zero: it enters `out`, but not m, l and u.
// Addresses of segments that hold none of the tokens are not looked at.
KVS_API int32_t kvs_attend(const kvs_layout *layout, kvs_pool *pool, const uint64_t *addresses, int64_t segments,
                           int64_t start, int64_t stop, const void *query, float scale, const float *sinks, void *out,
                           float *m, float *l, float *u);

// Copies rows [kv_heads][rows][head_dim] of the cache dtype to token positions start, start + 1, ... Strides in elements.
KVS_API int32_t kvs_append(const kvs_layout *layout, const uint64_t *addresses, int64_t segments, int64_t start,
                           int64_t rows, const void *key, int64_t key_head_stride, int64_t key_row_stride,
                           const void *value, int64_t value_head_stride, int64_t value_row_stride);

// One decode step: writes the row at `position`, then attends over [start, position + 1), which is not empty.
KVS_API int32_t kvs_append_and_attend(const kvs_layout *layout, kvs_pool *pool, const uint64_t *addresses,
                                      int64_t segments, int64_t start, int64_t position, const void *key,
                                      int64_t key_head_stride, const void *value, int64_t value_head_stride,
                                      const void *query, float scale, const float *sinks, void *out);

// Copies tokens [start, stop) to [kv_heads][stop - start][head_dim] buffers whose heads lie `out_head_stride` elements
// apart, in the cache dtype or, with as_float32, widened to fp32.
KVS_API int32_t kvs_gather(const kvs_layout *layout, kvs_pool *pool, const uint64_t *addresses, int64_t segments,
                           int64_t start, int64_t stop, void *out_key, void *out_value, int64_t out_head_stride,
                           int32_t as_float32);

// Merges two partial states of `heads` heads. The outputs may be either input.
KVS_API int32_t kvs_merge(int64_t heads, int64_t head_dim, const float *m1, const float *l1, const float *u1,
                          const float *m2, const float *l2, const float *u2, float *m, float *l, float *u);
