#include "pool.h"

#include <pthread.h>

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

}  // namespace kvern
