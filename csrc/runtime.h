// The operations on whole batches: a pool of threads, the kernels of one path, the buffers between
// operations, and the recording of programs.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops.h"
#include "pool.h"
#include "program.h"
#include "types.h"
#include "weights.h"

namespace kvern {

class Runtime {
public:
    Runtime(int num_threads, const std::string& path);

    const char* path() const { return kernels_->name; }
    int num_threads() const { return pool_.num_threads(); }

    std::unique_ptr<Weight> prepare(const std::vector<RawTensor>& tensors, int64_t cols, WeightForm form);

    // Runs one operation for `tokens` rows; while recording it also joins the program. `batch` is what
    // the operation reads of a step (or null). Attention returns what a program returns, others 0.
    int64_t run(std::unique_ptr<Op> op, int64_t tokens, const int32_t* token_ids, const StepBatch* batch);

    // The operations until `finish` are recorded as reading these token ids and batches.
    void start_recording(int64_t tokens, const int32_t* token_ids, std::vector<StepBatch> batches);
    bool is_recording() const { return recording_ != nullptr; }
    // Null when something ran that another step cannot repeat.
    std::unique_ptr<Program> finish_recording(int64_t max_tokens);
    // Returns the (row, visible key) pairs per head of all layers; -1 for an invalid block.
    int64_t run(const Program& program, int64_t tokens, const int32_t* token_ids, std::vector<StepBatch> batches);

    // For benchmarks: seconds to read `data` once with all threads, and seconds of a loop in registers.
    double time_reads(const uint8_t* data, int64_t bytes);
    double time_arithmetic(Arithmetic kind, int64_t rounds, double* operations);

private:
    struct Recording {
        int64_t tokens;
        const int32_t* token_ids;
        std::vector<StepBatch> batches;
        std::vector<std::unique_ptr<Op>> ops;
        bool is_repeatable = true;
    };

    int64_t execute(Step& step, const std::vector<Op*>& ops);
    void serve_stages(const Step& step, const Worker& worker);
    void record(std::unique_ptr<Op> op, int64_t tokens, const int32_t* token_ids, const StepBatch* batch);
    int find_batch(Op& op, const StepBatch& batch) const;

    const KernelTable* kernels_;
    ThreadPool pool_;
    WeightRoom weight_room_;
    std::mutex mutex_;  // one operation or program at a time: they share the buffers
    SharedBuffers shared_;
    std::unique_ptr<Recording> recording_;

    // The stages being run, and which of them is on.
    struct Progress {
        Counter next;
        Shares shares;  // of guided stages
        alignas(64) std::atomic<int64_t> done{0};
    };
    std::vector<Stage> stages_;
    std::deque<Progress> progress_;  // never moves
    Gate current_;
};

}  // namespace kvern
