// One pool of threads, its size settable. A region runs one function on all of them; inside it threads
// may meet at barriers. Idle workers spin for some microseconds, then sleep until woken.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace kvern {

struct PoolState;

// What a thread of a region knows about itself.
class Worker {
public:
    int id = 0;
    int count = 1;
    uint8_t* scratch = nullptr;  // this thread's own, as large as the region asked for

    void barrier() const {
        barrier([] {});
    }
    // The last to arrive calls last() before anybody goes on.
    template <class Last>
    void barrier(Last&& last) const {
        if (count == 1) {
            last();
            return;
        }
        const uint32_t turn = turn_now();
        if (is_last_to_arrive()) {
            last();
            release();
        } else {
            wait_past(turn);
        }
    }

    PoolState* state = nullptr;

private:
    uint32_t turn_now() const;
    bool is_last_to_arrive() const;
    void release() const;
    void wait_past(uint32_t turn) const;
};

class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }

    // Runs job(worker) on `threads` threads (at most all), the caller being number 0; returns when all
    // are done. One region at a time: a second caller waits. Jobs must not throw.
    void run(int threads, size_t scratch_bytes, const std::function<void(const Worker&)>& job);

private:
    PoolState* live_state();

    int num_threads_;
    std::mutex* mutex_;
    PoolState* state_ = nullptr;
    uint64_t generation_ = 0;  // counts forks: a child starts threads of its own
};

// Hands out [0, total) in runs to whoever asks.
class Counter {
public:
    void reset() { next_.store(0, std::memory_order_relaxed); }
    bool take(int64_t total, int64_t chunk, int64_t& begin, int64_t& end) {
        begin = next_.fetch_add(chunk, std::memory_order_relaxed);
        end = begin + chunk < total ? begin + chunk : total;
        return begin < total;
    }

    // Long runs first, shorter ones as the end nears; every border but the last a multiple of `least`.
    bool take_guided(int64_t total, int threads, int64_t least, int64_t& begin, int64_t& end) {
        begin = next_.load(std::memory_order_relaxed);
        do {
            if (begin >= total) return false;
            const int64_t share = (total - begin) / (2 * threads) / least * least;
            end = begin + (share > least ? share : least);
            if (end > total || threads == 1) end = total;
        } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
        return true;
    }

private:
    alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace kvern
