#include "pool.h"

#include <system_error>
#include <thread>

#include "weights.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif
#include <pthread.h>

namespace kvern {

namespace {

std::atomic<uint64_t> fork_generation{0};

void after_fork_in_child() { fork_generation.fetch_add(1); }

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number that threads wait on: they spin briefly, then sleep in the kernel.
class Gate {
public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void advance() {
        value_.fetch_add(1);
        if (sleepers_.load() != 0) wake();
    }

    void wait_past(uint32_t old, int spins) {
        for (int i = 0; i < spins; ++i) {
            if (value() != old) return;
            relax();
        }
        sleepers_.fetch_add(1);
        while (value_.load() == old) sleep(old);
        sleepers_.fetch_sub(1);
    }

private:
#if defined(__linux__)
    void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0); }
    void sleep(uint32_t old) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0); }
#else
    void wake() {
        std::lock_guard<std::mutex> hold(mutex_);
        changed_.notify_all();
    }
    void sleep(uint32_t old) {
        std::unique_lock<std::mutex> hold(mutex_);
        changed_.wait(hold, [&] { return value_.load() != old; });
    }
    std::mutex mutex_;
    std::condition_variable changed_;
#endif
    alignas(64) std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
};

}  // namespace

struct PoolState {
    std::vector<std::thread> threads;
    std::vector<Bytes> scratch;
    size_t scratch_bytes = 0;
    const std::function<void(const Worker&)>* job = nullptr;
    int active = 1;       // threads of the current region
    bool stopping = false;
    int spins = 0;
    Gate start, done, meet;
    alignas(64) std::atomic<int> running{0};
    alignas(64) std::atomic<int> arrived{0};
};

uint32_t Worker::turn_now() const { return state->meet.value(); }

bool Worker::is_last_to_arrive() const { return state->arrived.fetch_add(1) + 1 == count; }

void Worker::release() const {
    state->arrived.store(0);
    state->meet.advance();
}

void Worker::wait_past(uint32_t turn) const { state->meet.wait_past(turn, state->spins); }

namespace {

Worker worker_of(PoolState* s, int id) {
    Worker w;
    w.id = id;
    w.count = s->active;
    w.scratch = s->scratch[static_cast<size_t>(id)].get();
    w.state = s;
    return w;
}

void serve(PoolState* s, int id) {
    uint32_t turn = 0;
    for (;;) {
        s->start.wait_past(turn, s->spins);
        turn = s->start.value();
        if (s->stopping) return;
        if (id < s->active) (*s->job)(worker_of(s, id));
        if (s->running.fetch_sub(1) == 1) s->done.advance();
    }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), mutex_(new std::mutex) {
    static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
    (void)registered;
    generation_ = fork_generation.load();
}

ThreadPool::~ThreadPool() {
    if (generation_ != fork_generation.load()) return;  // the parent's threads: nothing to stop here
    if (state_) {
        state_->stopping = true;
        state_->start.advance();
        for (std::thread& t : state_->threads) t.join();
        delete state_;
    }
    delete mutex_;
}

PoolState* ThreadPool::live_state() {
    if (!state_) {
        state_ = new PoolState;
        state_->scratch.resize(static_cast<size_t>(num_threads_));
        // Spinning helps only while every thread has a core of its own.
        const int cores = static_cast<int>(std::thread::hardware_concurrency());
        state_->spins = num_threads_ <= cores ? 2000 : 20;
        try {
            for (int id = 1; id < num_threads_; ++id) state_->threads.emplace_back(serve, state_, id);
        } catch (const std::system_error&) {
            // The system grants no more threads: work with those there are.
        }
    }
    return state_;
}

void ThreadPool::run(int threads, size_t scratch_bytes, const std::function<void(const Worker&)>& job) {
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
    const int available = static_cast<int>(s->threads.size()) + 1;
    s->active = threads < 1 ? 1 : threads > available ? available : threads;
    if (s->active == 1) {
        job(worker_of(s, 0));
        return;
    }
    s->job = &job;
    s->running.store(available - 1);
    const uint32_t turn = s->done.value();
    s->start.advance();
    job(worker_of(s, 0));
    s->done.wait_past(turn, s->spins);
}

}  // namespace kvern
