#include "pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

struct kvs_pool {
    explicit kvs_pool(int threads) : owner(getpid()) {
        for (int worker = 1; worker < threads; worker++) {
            try {
                crew.emplace_back([this, worker] { serve(worker); });
            } catch (const std::system_error &) {
                break;  // the system grants no more threads: work with those there are
            }
        }
    }

    ~kvs_pool() {
        {
            std::lock_guard<std::mutex> hold(lock);
            closing = true;
        }
        wake.notify_all();
        for (std::thread &thread : crew) thread.join();
    }

    void serve(int worker) {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            wake.wait(hold, [&] { return closing || (open && round != seen); });
            if (closing) return;
            seen = round;
            busy++;
            hold.unlock();
            take(worker);
            hold.lock();
            if (--busy == 0) idle.notify_one();
        }
    }

    void take(int worker) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(job, i, worker);
    }

    void run(int64_t items, kvs::Work item, void *context) {
        {
            std::lock_guard<std::mutex> hold(lock);
            work = item, job = context, count = items;
            next.store(0, std::memory_order_relaxed);
            open = true;
            round++;
        }
        wake.notify_all();
        take(0);
        std::unique_lock<std::mutex> hold(lock);
        open = false;  // a worker that wakes only now finds nothing to do
        idle.wait(hold, [&] { return busy == 0; });
    }

    const pid_t owner;
    std::mutex callers;  // one job at a time
    std::mutex lock;     // guards all below but `next`
    std::condition_variable wake, idle;
    std::atomic<int64_t> next{0};
    kvs::Work work = nullptr;
    void *job = nullptr;
    int64_t count = 0;
    uint64_t round = 0;
    int busy = 0;
    bool open = false, closing = false;
    std::vector<std::thread> crew;
};

namespace kvs {

void run_items(kvs_pool *pool, bool alone, int64_t count, Work work, void *job) {
    if (pool && !alone && count > 1 && !pool->crew.empty() && pool->owner == getpid()) {
        std::unique_lock<std::mutex> turn(pool->callers, std::try_to_lock);
        if (turn.owns_lock()) return pool->run(count, work, job);
    }
    for (int64_t i = 0; i < count; i++) work(job, i, 0);
}

}  // namespace kvs

kvs_pool *kvs_pool_create(int32_t threads) {
    try {
        return new kvs_pool(threads < 1 ? 1 : threads);
    } catch (const std::exception &) {
        return nullptr;
    }
}

void kvs_pool_destroy(kvs_pool *pool) {
    // The threads of a parent do not exist in its forked child and cannot be joined there: the memory is let go.
    if (pool && pool->owner == getpid()) delete pool;
}

int32_t kvs_pool_threads(const kvs_pool *pool) { return pool ? int32_t(pool->crew.size()) + 1 : 1; }
