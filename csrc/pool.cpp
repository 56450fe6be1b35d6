#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "weights.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif

namespace kvern {

namespace {

constexpr int kSpins = 1000;         // about 10 to 40 microseconds
constexpr uint32_t kClosed = 1u << 31;
constexpr uint32_t kRunsOfShare = 4;  // a run is this part of what is left of a share

std::atomic<uint64_t> fork_generation{0};

void after_fork_in_child() { fork_generation.fetch_add(1); }

// While one lives, the thread takes numbers below the smallest normal one for zero. Some processors need a
// hundred times as long for them, and a weight, a probability or a product that small decides nothing.
class NoSubnormals {
public:
#if defined(__SSE2__)
    NoSubnormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040u); }  // FTZ, DAZ
    ~NoSubnormals() { __builtin_ia32_ldmxcsr(before_); }

private:
    unsigned before_;
#elif defined(__aarch64__)
    NoSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | uint64_t{1} << 24));  // FZ
    }
    ~NoSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

private:
    uint64_t before_;
#endif
};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

#if defined(__linux__)
struct Gate::Sleeper {
    void wake(std::atomic<uint32_t>& value) {
        syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
    }
    void sleep(std::atomic<uint32_t>& value, uint32_t old) {
        syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
};
#else
struct Gate::Sleeper {
    void wake(std::atomic<uint32_t>&) {
        std::lock_guard<std::mutex> hold(mutex);
        changed.notify_all();
    }
    void sleep(std::atomic<uint32_t>& value, uint32_t old) {
        std::unique_lock<std::mutex> hold(mutex);
        changed.wait(hold, [&] { return value.load() != old; });
    }
    std::mutex mutex;
    std::condition_variable changed;
};
#endif

Gate::Gate() : sleeper_(new Sleeper) {}
Gate::~Gate() = default;

void Gate::set(uint32_t value) {
    value_.store(value);
    if (sleepers_.load() != 0) sleeper_->wake(value_);
}

void Gate::wait_past(uint32_t old, int spins) {
    for (int i = 0; i < spins; ++i) {
        if (value() != old) return;
        relax();
    }
    sleepers_.fetch_add(1);
    while (value_.load() == old) sleeper_->sleep(value_, old);
    sleepers_.fetch_sub(1);
}

struct PoolState {
    std::vector<std::thread> threads;
    std::vector<Bytes> scratch;
    size_t scratch_bytes = 0;
    const std::function<void(const Worker&)>* job = nullptr;
    int spins = 0;
    std::atomic<bool> stopping{false};
    Gate start;    // counts regions
    Gate emptied;  // counts regions that were waited for
    // Threads inside the region; kClosed once the caller is done: then nobody enters.
    alignas(64) std::atomic<uint32_t> inside{kClosed};

    bool enter() {
        uint32_t now = inside.load();
        do {
            if (now & kClosed) return false;
        } while (!inside.compare_exchange_weak(now, now + 1));
        return true;
    }
    void leave() {
        if (inside.fetch_sub(1) - 1 == kClosed) emptied.set(emptied.value() + 1);
    }
    void close() {
        const uint32_t turn = emptied.value();
        if (inside.fetch_or(kClosed) != 0) emptied.wait_past(turn, spins);
    }
};

namespace {

void serve(PoolState* s, int id) {
    const NoSubnormals always;
    uint32_t turn = 0;
    for (;;) {
        s->start.wait_past(turn, s->spins);
        turn = s->start.value();
        if (s->stopping) return;
        if (!s->enter()) continue;
        (*s->job)({id, s->scratch[static_cast<size_t>(id)].get()});
        s->leave();
    }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), mutex_(new std::mutex) {
    static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
    (void)registered;
    generation_ = fork_generation.load();
    // Spinning helps only while every thread has a core of its own.
    spins_ = num_threads <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpins : 20;
}

ThreadPool::~ThreadPool() {
    if (generation_ != fork_generation.load()) return;  // the parent's threads: nothing to stop here
    if (state_) {
        state_->stopping = true;
        state_->start.set(state_->start.value() + 1);
        for (std::thread& t : state_->threads) t.join();
        delete state_;
    }
    delete mutex_;
}

PoolState* ThreadPool::live_state() {
    if (!state_) {
        state_ = new PoolState;
        state_->scratch.resize(static_cast<size_t>(num_threads_));
        state_->spins = spins_;
        try {
            for (int id = 1; id < num_threads_; ++id) state_->threads.emplace_back(serve, state_, id);
        } catch (const std::system_error&) {
            // The system grants no more threads: work with those there are.
        }
    }
    return state_;
}

void ThreadPool::run(bool is_shared, size_t scratch_bytes, const std::function<void(const Worker&)>& job) {
    const uint64_t generation = fork_generation.load();
    if (generation != generation_) {  // after a fork: the old threads do not exist here
        generation_ = generation;
        mutex_ = new std::mutex;
        state_ = nullptr;
    }
    std::lock_guard<std::mutex> hold(*mutex_);
    PoolState* s = live_state();
    if (scratch_bytes > s->scratch_bytes) {
        for (Bytes& b : s->scratch) b = allocate_bytes(scratch_bytes);
        s->scratch_bytes = scratch_bytes;
    }
    const NoSubnormals meanwhile;
    const Worker caller{0, s->scratch[0].get()};
    if (!is_shared || num_threads_ == 1) return job(caller);
    s->job = &job;
    s->inside.store(0);
    s->start.set(s->start.value() + 1);
    job(caller);
    s->close();
}

void Shares::reset(int64_t total, int64_t least, int threads) {
    if (shares_.size() != static_cast<size_t>(threads)) shares_ = std::vector<Share>(static_cast<size_t>(threads));
    const int64_t runs = (total + least - 1) / least;
    least_ = static_cast<uint32_t>(least);
    auto border = [&](int64_t i) { return static_cast<uint32_t>(std::min(total, runs * i / threads * least)); };
    for (int64_t i = 0; i < threads; ++i) {
        shares_[static_cast<size_t>(i)].range.store(packed({border(i), border(i + 1)}), std::memory_order_relaxed);
    }
}

// What is taken first of `left`.
Shares::Range Shares::run_of(Range left) const {
    const uint32_t count = left.end - left.begin;
    const uint32_t part = shares_.size() == 1 ? count : count / kRunsOfShare / least_ * least_;
    return {left.begin, left.begin + std::min(count, std::max(part, least_))};
}

bool Shares::take_own(Share& own, Range& run) {
    uint64_t now = own.range.load(std::memory_order_relaxed);
    for (;;) {
        const Range left = unpacked(now);
        if (left.begin == left.end) return false;
        run = run_of(left);
        if (own.range.compare_exchange_weak(now, packed({run.end, left.end}), std::memory_order_relaxed)) return true;
    }
}

bool Shares::steal(Range& stolen) {
    for (;;) {
        Share* from = nullptr;
        uint64_t word = 0;
        Range left{0, 0};
        for (Share& share : shares_) {
            const uint64_t now = share.range.load(std::memory_order_relaxed);
            const Range r = unpacked(now);
            if (r.end - r.begin > left.end - left.begin) from = &share, word = now, left = r;
        }
        if (!from) return false;
        stolen = {left.begin + (left.end - left.begin) / 2 / least_ * least_, left.end};
        // Its owner, or another thief, may have been faster: then look again.
        if (from->range.compare_exchange_strong(word, packed({left.begin, stolen.begin}), std::memory_order_relaxed)) return true;
    }
}

bool Shares::take(int id, int64_t& begin, int64_t& end) {
    Share& own = shares_[static_cast<size_t>(id)];
    Range run{0, 0};
    if (!take_own(own, run)) {
        Range stolen{0, 0};
        if (!steal(stolen)) return false;
        // The rest becomes its own share, so that others can take from it in turn: nobody else writes to an empty one.
        run = run_of(stolen);
        own.range.store(packed({run.end, stolen.end}), std::memory_order_relaxed);
    }
    begin = run.begin;
    end = run.end;
    return true;
}

}  // namespace kvern
