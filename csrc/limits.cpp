// Measures the machine's limits with the kernels' own threads, for benchmarks.
#include <atomic>
#include <chrono>

#include "runtime.h"

namespace kvern {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double Runtime::time_reads(const uint8_t* data, int64_t bytes) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t piece = 1 << 20;
    Counter next;
    std::atomic<int> sink{0};
    pool_.run(true, 0, [&](const Worker&) {
        int64_t begin, end;
        float sum = 0.0f;
        while (next.take(bytes / piece, 1, begin, end)) {
            sum += kernels_->read_loop(reinterpret_cast<const float*>(data + begin * piece), piece / 4);
        }
        sink += sum > 0.0f;
    });
    return seconds_since(start);
}

double Runtime::time_arithmetic(Arithmetic kind, int64_t rounds, double* operations) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<int64_t> done{0};
    pool_.run(true, 0, [&](const Worker&) {
        float sink = 0.0f;
        done += static_cast<int64_t>(kernels_->arithmetic_loop(kind, rounds, &sink));
    });
    *operations = static_cast<double>(done.load());
    return seconds_since(start);
}

}  // namespace kvern
