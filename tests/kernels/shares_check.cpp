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

// Threads 0 to `present` - 1 of `threads` come. Returns false with a line about what is wrong.
bool hand_out(kvern::Shares& shares, int64_t total, int64_t least, int threads, int present) {
    shares.reset(total, least, threads);
    std::vector<std::atomic<int>> taken(static_cast<size_t>(total));
    std::atomic<bool> is_aligned{true}, goes_on{true};
    auto work = [&](int id) {
        int64_t begin, end, last = -1, jumps = 0;
        while (shares.take(id, begin, end)) {
            if (begin >= end || begin % least || (end % least && end != total)) is_aligned = false;
            for (int64_t i = begin; i < end; ++i) taken[static_cast<size_t>(i)].fetch_add(1);
            jumps += begin != last;
            last = end;
        }
        if (present == 1 && threads == 1 && jumps > 1) goes_on = false;
    };
    std::vector<std::thread> others;
    for (int id = 1; id < present; ++id) others.emplace_back(work, id);
    work(0);
    for (std::thread& t : others) t.join();
    bool is_once = true;
    for (const auto& n : taken) is_once = is_once && n.load() == 1;
    if (is_once && is_aligned && goes_on) return true;
    std::printf("%lld units in runs of %lld, %d of %d threads: %s\n", static_cast<long long>(total), static_cast<long long>(least), present, threads,
                !is_once ? "not each once" : !is_aligned ? "a border is off" : "one thread jumps");
    return false;
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
    for (const int64_t total : {1, 2, 3, 7, 30, 37, 1000}) {
        for (const int64_t least : {1, 2, 3, 64}) {
            for (const int threads : {1, 2, 3, 8}) {
                for (int present = 1; present <= threads; ++present) is_right = hand_out(shares, total, least, threads, present) && is_right;
            }
        }
    }
    for (int i = 0; i < 200; ++i) is_right = hand_out(shares, 64, 1, 4, 4) && is_right;
    std::puts(is_right ? "right" : "wrong");
    return is_right ? 0 : 1;
}
