// A recorded sequence of operations that runs again for another step in one call.
#pragma once
#include <memory>
#include <vector>

#include "family_types.h"
#include "ops.h"

namespace kvern {

// Joins what can go together without changing a bit: row operations that need not meet, norms and gates
// that make a product's input, sums that a product's rows can be added to at once.
std::vector<std::unique_ptr<Op>> fuse(std::vector<std::unique_ptr<Op>> ops);

class Program {
public:
    Program(std::vector<std::unique_ptr<Op>> recorded, int64_t max_tokens, int num_batches);

    // Positions that every rotary table of the program covers.
    int64_t max_positions() const { return max_positions_; }
    int64_t max_tokens() const { return max_tokens_; }
    int num_batches() const { return num_batches_; }
    int64_t vocab() const { return vocab_; }
    const std::vector<std::unique_ptr<Op>>& ops() const { return ops_; }
    // Tokens per block of a batch's tables; 0 when no attention reads it.
    int64_t block_size(int group) const;
    // What appends write, to check slots against.
    struct Slots {
        int group;
        int64_t block_size, num_blocks;
        int64_t num_seats, max_rows;  // of a narrow stream; 0: slots say where rows go
    };
    const std::vector<Slots>& appended() const { return appended_; }
    // States that are read and written, to check their pages.
    struct Entry {
        int group;
        StatePlace place;
    };
    const std::vector<Entry>& states() const { return states_; }

private:
    std::vector<std::unique_ptr<Op>> ops_;
    int64_t max_tokens_;
    int num_batches_;
    int64_t max_positions_;
    int64_t vocab_;
    std::vector<Slots> appended_;
    std::vector<Entry> states_;
};

}  // namespace kvern
