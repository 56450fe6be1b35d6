// One pool of threads, its size settable. A region runs one function on the caller and on every thread
// that wakes in time; work is claimed in pieces, so a thread that the system keeps waiting holds nobody
// up unless it has claimed a piece. Idle threads spin for some microseconds, then sleep until woken.
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
struct Worker {
    int id = 0;                  // the caller is 0
    uint8_t* scratch = nullptr;  // this thread's own, as large as the region asked for
};

// A number that threads wait on: they spin briefly, then sleep in the kernel.
class Gate {
public:
    Gate();
    ~Gate();
    uint32_t value() const { return value_.load(std::memory_order_acquire); }
    void set(uint32_t value);
    void wait_past(uint32_t old, int spins);

private:
    struct Sleeper;  // what the platform needs beside the number
    alignas(64) std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
    std::unique_ptr<Sleeper> sleeper_;
};

class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }
    // How often a thread looks before it sleeps.
    int spins() const { return spins_; }

    // Runs job(worker) here and, when `is_shared`, on all other threads that arrive before it is done here;
    // returns when every thread has left. One region at a time: a second caller waits. Jobs must not throw.
    void run(bool is_shared, size_t scratch_bytes, const std::function<void(const Worker&)>& job);

private:
    PoolState* live_state();

    int num_threads_;
    int spins_;
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

private:
    alignas(64) std::atomic<int64_t> next_{0};
};

// Hands out [0, total) so that each thread goes on where it left off, which memory is read fastest by: a thread takes
// its own share run by run, long ones first, and when that is used up half of the largest that another has left. Who
// never comes keeps nothing; who looks for work just while a stolen half changes hands may go away without.
class Shares {
public:
    // Borders of shares and runs are multiples of `least`, but the last. At most 2^31 units.
    void reset(int64_t total, int64_t least, int threads);
    bool take(int id, int64_t& begin, int64_t& end);

private:
    struct Range {
        uint32_t begin, end;
    };
    struct alignas(64) Share {
        std::atomic<uint64_t> range{0};
    };
    static uint64_t packed(Range r) { return static_cast<uint64_t>(r.begin) << 32 | r.end; }
    static Range unpacked(uint64_t word) { return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)}; }
    Range run_of(Range left) const;
    bool take_own(Share& own, Range& run);
    bool steal(Range& stolen);

    std::vector<Share> shares_;
    uint32_t least_ = 1;
};

}  // namespace kvern
