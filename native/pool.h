// A small pool of waiting threads. The caller works too; with a forked child, a busy pool or none, it works alone.
#pragma once

#include <cstdint>

#include "kvstrata.h"

namespace kvs {

// Item `index` of a job, run by worker `worker` (0 is the caller, below kvs_pool_threads()).
using Work = void (*)(void *job, int64_t index, int worker);

// Runs items 0 .. count - 1, in any order, and returns when all are done. `alone` keeps them on the calling thread.
void run_items(kvs_pool *pool, bool alone, int64_t count, Work work, void *job);

template <class Item> void run(kvs_pool *pool, bool alone, int64_t count, Item &item) {
    run_items(pool, alone, count, [](void *job, int64_t index, int worker) { (*static_cast<Item *>(job))(index, worker); },
              &item);
}

}  // namespace kvs
