#include "attend_plan.h"

#include <algorithm>
#include <map>

#include "ops.h"

namespace kvern {

namespace {

constexpr int kPreferredRows = 96;                   // query rows that share a packed tile
constexpr int64_t kPartialLimit = int64_t{2} << 20;  // floats of unit partials one call may hold
constexpr int64_t kTasksPerThread = 16;
constexpr int64_t kFewTokens = 4;  // a sequence with more new tokens is bound by arithmetic: it shares nothing

int64_t first_unit(const PlanKey& k, int64_t position) {
    if (k.num_sinks > 0) return 0;
    int64_t start = 0;
    if (k.window > 0) start = std::max(start, position - k.window + 1);
    if (k.chunk > 0) start = std::max(start, position / k.chunk * k.chunk);
    return start / kUnit;
}

}  // namespace

struct AttendPlan::Sequence {
    int64_t seq, first_token, tokens, first_position;
    int64_t shared_units = 0;  // units [0, shared_units) are walked together with others

    int64_t unit_end() const { return (first_position + tokens - 1) / kUnit + 1; }
};

// Tokens of a sequence that go into one piece.
int64_t AttendPlan::tokens_at_once() const {
    const int group = key.num_heads / key.num_kv_heads;
    return std::max(1, kPreferredRows / std::min(group, kMaxItemRows));
}

// Units of the piece that begins with the sequence's token `i`, from position 0 on.
int64_t AttendPlan::units_of_piece(const Sequence& s, int64_t i) const {
    const int64_t n = std::min(tokens_at_once(), s.tokens - i);
    return (s.first_position + i + n - 1) / kUnit + 1 + (key.is_narrow ? 1 : 0);
}

AttendPlan::AttendPlan(const StepBatch& batch, const PlanKey& plan_key, int threads) : key(plan_key) {
    std::vector<Sequence> sequences;
    int64_t units = 0;
    for (int64_t s = 0; s < batch.num_seqs; ++s) {
        const int64_t rows = batch.cu_seqlens[s + 1] - batch.cu_seqlens[s];
        if (rows == 0) continue;
        sequences.push_back({s, batch.cu_seqlens[s], rows, batch.seq_lens[s] - rows});
        units += sequences.back().unit_end() - first_unit(key, batch.seq_lens[s] - 1);
    }
    place_of_token_.resize(static_cast<size_t>(batch.cu_seqlens[batch.num_seqs]));
    if (key.window == 0 && key.chunk == 0 && sequences.size() > 1) find_shared(batch, sequences);
    // With enough units in all, KV heads need not be told apart to keep the threads busy.
    for (const Sequence& s : sequences) add_own_pieces(s, units >= 3 * threads);
    split_for(threads);
    list_tasks(threads);
}

// With `heads_together` the KV heads of a few query rows go as one piece: their keys lie side by side in
// a page, so memory is read in longer runs.
void AttendPlan::add_own_pieces(const Sequence& s, bool heads_together) {
    const int group = key.num_heads / key.num_kv_heads;
    const int heads_at_once = std::min(group, kMaxItemRows);
    const int kv_at_once = heads_together && s.tokens * key.num_heads <= kMaxItemRows ? key.num_kv_heads : 1;
    for (int64_t i = 0; i < s.tokens; i += tokens_at_once()) {
        const int n = static_cast<int>(std::min(tokens_at_once(), s.tokens - i));
        const int64_t position = s.first_position + i;
        const int64_t begin = std::max(s.shared_units, first_unit(key, position));
        for (int h = 0; h < key.num_kv_heads; h += kv_at_once) {
            for (int g = 0; g < group; g += heads_at_once) {
                pieces.push_back({s.seq, s.first_token, false, position, s.first_token + i, n, h * group + g,
                                  std::min(heads_at_once, group - g), h, kv_at_once, begin, units_of_piece(s, i),
                                  -1});
            }
        }
    }
}

// Room for all heads' partials of a token, once; one more entry that says where it is.
void AttendPlan::place_token(int64_t token, int64_t begin, int64_t units) {
    AttendPlace& place = place_of_token_[static_cast<size_t>(token)];
    if (place.units == 0) {
        place = {token, partial_floats, begin, units};
        partial_floats += units * key.num_heads * (key.padded + 2);
        num_partials += units * key.num_heads;
        for (int h = 0; h < key.num_heads; ++h) merges.push_back({places.size(), h});
    }
    places.push_back(place);
}

// Sequences whose tables name the same blocks walk these units as one: their keys are read once.
void AttendPlan::find_shared(const StepBatch& b, std::vector<Sequence>& all) {
    std::map<int32_t, std::vector<Sequence*>> by_first_block;
    for (Sequence& s : all) {
        if (s.tokens <= kFewTokens && s.first_position >= kUnit) {
            by_first_block[b.block_tables[s.seq * b.table_stride]].push_back(&s);
        }
    }
    for (auto& [block, together] : by_first_block) {
        if (block > 0 && together.size() > 1) share_from(b, together, 0);
    }
}

// All of `together` have the same blocks before `unit`: finds how long that goes on, and with whom.
void AttendPlan::share_from(const StepBatch& b, std::vector<Sequence*> together, int64_t unit) {
    const int64_t begin = unit;
    auto blocks_until = [&](int64_t u) { return (u * kUnit + key.block_size - 1) / key.block_size; };
    auto unit_blocks = [&](const Sequence& s, int64_t u) {
        const int32_t* table = b.block_tables + s.seq * b.table_stride;
        return std::vector<int32_t>(table + u * kUnit / key.block_size, table + blocks_until(u + 1));
    };
    std::map<std::vector<int32_t>, std::vector<Sequence*>> classes;
    for (;; ++unit) {
        classes.clear();
        for (Sequence* s : together) {
            // Of narrow streams a query reads blocks before its own as they are stored.
            const int64_t end = key.is_narrow ? s->first_position / key.block_size * key.block_size : s->first_position;
            if ((unit + 1) * kUnit <= end) classes[unit_blocks(*s, unit)].push_back(s);
        }
        if (classes.size() != 1 || classes.begin()->second.size() != together.size()) break;
    }
    if (unit > begin) {
        for (Sequence* s : together) s->shared_units = unit;
        add_shared_pieces(together, begin, unit);
    }
    for (auto& [blocks, members] : classes) {
        if (members.size() > 1) share_from(b, members, unit);
    }
}

void AttendPlan::add_shared_pieces(const std::vector<Sequence*>& sharers, int64_t unit_begin, int64_t unit_end) {
    const int group = key.num_heads / key.num_kv_heads;
    const int heads_at_once = std::min(group, kMaxItemRows);
    const auto at_once = static_cast<size_t>(tokens_at_once());
    std::vector<std::pair<int64_t, int64_t>> tokens;  // token, units of its whole context
    for (const Sequence* s : sharers) {
        for (int64_t i = 0; i < s->tokens; ++i) {
            tokens.emplace_back(s->first_token + i, units_of_piece(*s, i / tokens_at_once() * tokens_at_once()));
        }
    }
    for (size_t i = 0; i < tokens.size(); i += at_once) {
        const size_t n = std::min(at_once, tokens.size() - i);
        const auto first_place = static_cast<int64_t>(places.size());
        for (size_t t = i; t < i + n; ++t) place_token(tokens[t].first, 0, tokens[t].second);
        for (int h = 0; h < key.num_kv_heads; ++h) {
            for (int g = 0; g < group; g += heads_at_once) {
                pieces.push_back({sharers.front()->seq, 0, true, 0, 0, static_cast<int>(n), h * group + g,
                                  std::min(heads_at_once, group - g), h, 1, unit_begin, unit_end, first_place});
            }
        }
    }
}

// Pieces whose tokens share a prefix store partials anyway. Others do when there are too few pieces to
// keep all threads busy.
void AttendPlan::split_for(int threads) {
    const bool too_few = threads > 1 && static_cast<int64_t>(pieces.size()) < 8 * threads;
    int64_t more = 0;
    for (Piece& p : pieces) {
        if (p.first_place >= 0) continue;
        const int64_t units = p.unit_end - p.unit_begin;
        if (!is_placed(p.first_token)) {
            const int64_t need = units * p.num_tokens * key.num_heads * (key.padded + 2);
            if (!too_few || units < 2 || more + need > kPartialLimit) continue;
            more += need;
        }
        p.first_place = static_cast<int64_t>(places.size());
        for (int i = 0; i < p.num_tokens; ++i) place_token(p.first_token + i, p.unit_begin, units);
    }
}

// Few units each, so that all threads end together: what a thread takes in a row it joins, and goes on with keys that
// it has asked for ahead.
void AttendPlan::list_tasks(int threads) {
    int64_t split_units = 0;
    for (const Piece& p : pieces) split_units += p.first_place < 0 ? 0 : p.unit_end - p.unit_begin;
    const int64_t at_once = std::max<int64_t>(1, split_units / (kTasksPerThread * threads));
    for (size_t i = pieces.size(); i-- > 0;) {  // long prompts' last pieces, the costliest, go first in a share
        const Piece& p = pieces[i];
        work += (p.unit_end - p.unit_begin) * kUnit * p.rows();
        const int64_t run = p.first_place < 0 ? p.unit_end - p.unit_begin : at_once;
        for (int64_t u = p.unit_begin; u < p.unit_end; u += run) tasks.push_back({i, u, std::min(u + run, p.unit_end)});
    }
}

}  // namespace kvern
