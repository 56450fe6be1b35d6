// How one attention call is cut into items: built once per step and shared by all layers of a geometry.
// The cut never changes a result: whoever computes a unit, and with whom, its arithmetic is the same, and
// units always merge in position order.
#pragma once
#include <cstdint>
#include <vector>

#include "types.h"

namespace kvern {

struct StepBatch;

// What a plan depends on beside the step's batch.
struct PlanKey {
    int group, num_heads, num_kv_heads, block_size, padded;
    bool is_narrow;  // a query's own block is one more unit, after all others
    int64_t window, chunk, num_sinks;

    bool operator==(const PlanKey& o) const {
        return group == o.group && num_heads == o.num_heads && num_kv_heads == o.num_kv_heads &&
               block_size == o.block_size && padded == o.padded && is_narrow == o.is_narrow && window == o.window && chunk == o.chunk &&
               num_sinks == o.num_sinks;
    }
};

// Tokens that walk the same keys together.
struct Piece {
    int64_t seq;             // whose block table is read
    int64_t sequence_token;  // its first token in the step
    bool sees_all;           // a prefix that several sequences share
    int64_t first_position;
    int64_t first_token;
    int num_tokens;
    int first_head, num_heads;  // per KV head
    int first_kv_head, num_kv_heads;
    int64_t unit_begin, unit_end;
    int64_t first_place;     // in `places`; -1: the piece merges its units itself

    int rows() const { return num_tokens * num_heads * num_kv_heads; }
};

struct AttendPlan {
    struct Task {
        size_t piece;
        int64_t unit_begin, unit_end;

        bool joins(const Task& next) const { return next.piece == piece && next.unit_begin == unit_end; }
    };
    struct Merge {
        size_t place;
        int head;
    };

    PlanKey key;
    std::vector<Piece> pieces;
    std::vector<AttendPlace> places;
    std::vector<Task> tasks;
    std::vector<Merge> merges;    // rows whose unit partials are merged afterwards
    int64_t partial_floats = 0;
    int64_t num_partials = 0;
    int64_t work = 0;             // (row, key) pairs at most

    AttendPlan(const StepBatch& batch, const PlanKey& key, int threads);

private:
    struct Sequence;
    void add_own_pieces(const Sequence& s, bool heads_together);
    void add_shared_pieces(const std::vector<Sequence*>& sharers, int64_t unit_begin, int64_t unit_end);
    void find_shared(const StepBatch& b, std::vector<Sequence>& all);
    void share_from(const StepBatch& b, std::vector<Sequence*> together, int64_t unit);
    void place_token(int64_t token, int64_t first_unit, int64_t units);
    bool is_placed(int64_t token) const { return place_of_token_[static_cast<size_t>(token)].units > 0; }
    void split_for(int threads);
    void list_tasks(int threads);
    int64_t tokens_at_once() const;
    int64_t units_of_piece(const Sequence& s, int64_t i) const;

    std::vector<AttendPlace> place_of_token_;  // no units: none
};

}  // namespace kvern
