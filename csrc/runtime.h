// The operations on whole batches: splits work over threads, owns the buffers between kernels.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "pool.h"
#include "types.h"
#include "weights.h"

namespace kvern {

struct AttendCall {
    const float* q;
    int64_t q_token_stride;
    int num_heads;
    StreamView keys, values;
    const int32_t* cu_seqlens;
    const int32_t* seq_lens;
    int64_t num_seqs;
    const int32_t* block_tables;
    int64_t table_stride;
    AttendParams params;
    float* out;
    int64_t out_token_stride;
};

class Runtime {
public:
    Runtime(int num_threads, const std::string& path);

    const char* path() const { return kernels_->name; }
    int num_threads() const { return pool_.num_threads(); }

    std::unique_ptr<Weight> prepare(const std::vector<RawTensor>& tensors, int64_t cols, bool as_float);
    void matmul(const Weight& w, const float* x, int64_t num_tokens, float* out);
    void embed(const Weight& w, const int32_t* ids, int64_t num_tokens, float* out);
    void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t cols, float* out);
    void rotary(float* x, int64_t token_stride, int64_t num_tokens, int heads, int dim,
                const int32_t* positions, const float* cos, const float* sin, int half, bool interleaved);
    void append(const float* x, int64_t token_stride, int64_t num_tokens, const StreamView& stream,
                const int64_t* slots);
    // Returns the (row, visible key) pairs per head; -1 when a block table names no valid block.
    int64_t attend(const AttendCall& call);
    void gated_activation(const float* gate_up, Activation kind, int64_t rows, int64_t cols, float* out);
    void add(float* x, const float* y, int64_t count);

    // Seconds to read `bytes` once with all threads, and seconds per operation of one kind.
    double time_reads(const uint8_t* data, int64_t bytes);
    double time_arithmetic(Arithmetic kind, int64_t rounds, double* operations);

private:
    // Runs f(begin, end) over rows, on one thread when there is little to do.
    template <class Rows>
    void over_rows(int64_t rows, int64_t work_per_row, Rows&& f);
    void grow(Bytes& buffer, size_t& have, size_t need);

    const KernelTable* kernels_;
    ThreadPool pool_;
    std::mutex mutex_;  // one operation at a time: they share the buffers below
    Bytes quant_, partial_;
    size_t quant_bytes_ = 0, partial_bytes_ = 0;
};

}  // namespace kvern
