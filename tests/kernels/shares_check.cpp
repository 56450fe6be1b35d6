// Threads that share out units: each unit goes to exactly one, whoever comes late or never. Built with a check for
// data races by test_native_shares.py.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"
#include "weights.h"

namespace kvern {  // of the file that pool.cpp takes its buffers from
void FreeBytes::operator()(uint8_t* p) const { std::free(p); }
Bytes allocate_bytes(size_t size) { return Bytes(static_cast<uint8_t*>(std::malloc(size))); }
}  // namespace kvern

namespace {

// Threads 0 to `present` - 1 of `threads` come, together; `busy` becomes how many of them got any unit. Returns false
// with a line about what is wrong.
bool hand_out(kvern::Shares& shares, int64_t total, int64_t least, int threads, int present, int& busy) {
    shares.reset(total, least, threads);
    std::vector<std::atomic<int>> taken(static_cast<size_t>(total));
    std::atomic<bool> is_aligned{true};
    std::atomic<int> here{0}, workers{0};
    auto work = [&](int id) {
        ++here;
        while (here.load() < present) std::this_thread::yield();
        int64_t begin, end, got = 0;
        while (shares.take(id, begin, end)) {
            if (begin >= end || begin % least || (end % least && end != total)) is_aligned = false;
            for (int64_t i = begin; i < end; ++i) taken[static_cast<size_t>(i)].fetch_add(1);
            got += end - begin;
            std::this_thread::yield();  // or on few cores the first takes all before the others run
        }
        workers += got > 0;
    };
    std::vector<std::thread> others;
    for (int id = 1; id < present; ++id) others.emplace_back(work, id);
    work(0);
    for (std::thread& t : others) t.join();
    busy = workers.load();
    bool is_once = true;
    for (const auto& n : taken) is_once = is_once && n.load() == 1;
    if (is_once && is_aligned) return true;
    std::printf("%lld units in runs of %lld, %d of %d threads: %s\n", static_cast<long long>(total), static_cast<long long>(least), present, threads,
                is_once ? "a border is off" : "not each once");
    return false;
}

// Threads that start as closely as can be and never pause, `of` of them beside one that never comes: its share is where
// they meet when their own are done.
bool meet(kvern::Shares& shares, int64_t total, int of) {
    shares.reset(total, 1, of + 1);
    std::vector<std::atomic<int>> taken(static_cast<size_t>(total));
    std::atomic<int> here{0};
    auto work = [&](int id) {
        ++here;
        for (int i = 0; here.load() < of; ++i) {
            if (i % 1000 == 999) std::this_thread::yield();
        }
        int64_t begin, end;
        while (shares.take(id, begin, end)) {
            for (int64_t i = begin; i < end; ++i) taken[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
        }
    };
    std::vector<std::thread> others;
    for (int id = 1; id < of; ++id) others.emplace_back(work, id);
    work(0);
    for (std::thread& t : others) t.join();
    for (const auto& n : taken) {
        if (n.load() != 1) return std::puts("threads that met in a share: not each unit once"), false;
    }
    return true;
}

// A thread alone in its share goes through it from front to back before it takes from another's.
bool own_share_comes_first() {
    kvern::Shares shares;
    shares.reset(100, 1, 2);
    int64_t begin, end, next = 50;
    while (next < 100) {
        if (!shares.take(1, begin, end) || begin != next) return std::printf("the share's run begins at %lld, not %lld\n", static_cast<long long>(begin), static_cast<long long>(next)), false;
        next = end;
    }
    if (!shares.take(1, begin, end) || begin != 25) return std::printf("the stolen half begins at %lld\n", static_cast<long long>(begin)), false;
    if (!shares.take(0, begin, end) || begin != 0) return std::printf("the owner's front begins at %lld\n", static_cast<long long>(begin)), false;
    return true;
}

}  // namespace

int main() {
    bool is_right = own_share_comes_first();
    kvern::Shares shares;  // one, to see that nothing stays from the work before
    int busy = 0;
    for (const int64_t total : {1, 2, 3, 7, 30, 37, 1000}) {
        for (const int64_t least : {1, 2, 3, 64}) {
            for (const int threads : {1, 2, 3, 8}) {
                for (int present = 1; present <= threads; ++present) {
                    is_right = hand_out(shares, total, least, threads, present, busy) && is_right;
                }
            }
        }
    }
    int most = 0;
    for (int i = 0; i < 200; ++i) {
        is_right = hand_out(shares, 64, 1, 4, 4, busy) && is_right;
        most = busy > most ? busy : most;
    }
    for (int i = 0; i < 1000; ++i) is_right = meet(shares, 256, 3) && is_right;
    if (most < 2) is_right = false, std::puts("one thread did all the work of 200 rounds: nothing was contended");
    std::puts(is_right ? "right" : "wrong");
    return is_right ? 0 : 1;
}
