// What the bindings share: array types and their checks, a runtime with what it keeps alive, a step's batch.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <any>
#include <sstream>

#include "family_types.h"
#include "runtime.h"

namespace nb = nanobind;

namespace kvern {

template <class T>
using Array = nb::ndarray<T, nb::device::cpu>;
using Floats = Array<const float>;
using FloatsOut = Array<float>;
using Ints = Array<const int32_t>;
using Longs = Array<const int64_t>;
using RawBytes = Array<const uint8_t>;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw nb::value_error(text.str().c_str());
}

// Contiguous but, with `free_first`, for the first axis.
template <class A>
void require(const A& a, const char* name, size_t ndim, bool free_first = false) {
    if (a.ndim() != ndim) fail(name, " has ", a.ndim(), " dimensions, expected ", ndim);
    int64_t stride = 1;
    for (size_t i = ndim; i-- > 0;) {
        const bool is_free = free_first && i == 0;
        if (!is_free && a.shape(i) > 1 && a.stride(i) != stride) {
            fail(name, " must be C-contiguous", free_first ? " beyond its first axis" : "");
        }
        stride *= static_cast<int64_t>(a.shape(i));
    }
}

// Views whose last axis is contiguous.
template <class A>
void require_rows(const A& a, const char* name, size_t ndim) {
    if (a.ndim() != ndim) fail(name, " has ", a.ndim(), " dimensions, expected ", ndim);
    if (a.shape(ndim - 1) > 1 && a.stride(ndim - 1) != 1) fail("the last axis of ", name, " must be contiguous");
}

template <class A>
void require_size(const A& a, const char* name, size_t axis, int64_t expected) {
    if (static_cast<int64_t>(a.shape(axis)) != expected) {
        fail(name, " has ", a.shape(axis), " entries in dimension ", axis, ", expected ", expected);
    }
}

// A runtime, and what a recording must keep alive: the arrays and weights that its operations point to.
struct Handle {
    Runtime runtime;
    std::vector<std::any> kept;

    Handle(int num_threads, const std::string& path) : runtime(num_threads, path) {}
    template <class... Things>
    void keep(const Things&... things) {
        if (runtime.is_recording()) (kept.emplace_back(things), ...);
    }
};

inline int64_t run(Handle& h, std::unique_ptr<Op> op, int64_t tokens, const int32_t* ids = nullptr,
            const StepBatch* batch = nullptr) {
    nb::gil_scoped_release unlocked;
    return h.runtime.run(std::move(op), tokens, ids, batch);
}

inline void check_ids(const Ints& ids, int64_t vocab) {
    require(ids, "token_ids", 1);
    for (size_t i = 0; i < ids.shape(0); ++i) {
        if (ids.data()[i] < 0 || ids.data()[i] >= vocab) {
            fail("token id ", ids.data()[i], " is not in the vocabulary of ", vocab);
        }
    }
}

inline void check_positions(const int32_t* positions, int64_t tokens, int64_t table_rows) {
    for (int64_t i = 0; i < tokens; ++i) {
        if (positions[i] < 0 || positions[i] >= table_rows) {
            fail("position ", positions[i], " is outside the rotary table of ", table_rows);
        }
    }
}

// (cu_seqlens_q, seq_lens, block_tables, positions, slot_mapping, seats)
using BatchTuple = std::tuple<Ints, Ints, Ints, Ints, Longs, std::optional<Ints>>;

inline StepBatch step_batch(const BatchTuple& t, int64_t tokens, int64_t block_size) {
    const auto& [cu_seqlens, seq_lens, tables, positions, slots, seats] = t;
    require(cu_seqlens, "cu_seqlens_q", 1);
    require(seq_lens, "seq_lens", 1);
    require(tables, "block_tables", 2, true);
    require(positions, "positions", 1);
    require(slots, "slot_mapping", 1);
    const auto num_seqs = static_cast<int64_t>(seq_lens.shape(0));
    require_size(cu_seqlens, "cu_seqlens_q", 0, num_seqs + 1);
    require_size(tables, "block_tables", 0, num_seqs);
    for (int64_t s = 0; s < num_seqs && block_size > 0; ++s) {
        const int64_t rows = cu_seqlens.data()[s + 1] - cu_seqlens.data()[s];
        const int64_t length = seq_lens.data()[s];
        const int64_t room = static_cast<int64_t>(tables.shape(1)) * block_size;
        if (rows < 0 || cu_seqlens.data()[s] < 0 || length < rows || length > room) {
            fail("sequence ", s, ": ", rows, " rows, ", length, " keys, room for ", room, " in its block table");
        }
    }
    if (cu_seqlens.data()[0] != 0 || cu_seqlens.data()[num_seqs] != tokens) {
        fail("cu_seqlens_q runs from ", cu_seqlens.data()[0], " to ", cu_seqlens.data()[num_seqs],
             ", expected 0 to ", tokens);
    }
    if (seats) {
        require(*seats, "seats", 1);
        require_size(*seats, "seats", 0, num_seqs);
    }
    return {cu_seqlens.data(), seq_lens.data(),  num_seqs,     tables.data(),
            tables.stride(0),  positions.data(), slots.data(), seats ? seats->data() : nullptr};
}

// Every sequence with rows must name valid pages for the whole of a state's tensor.
inline void check_entries(const BatchTuple& t, const StatePlace& place) {
    const auto& cu_seqlens = std::get<0>(t);
    const auto& tables = std::get<2>(t);
    const int64_t first = place.offset / place.page_bytes;
    const int64_t last = (place.offset + place.num_bytes - 1) / place.page_bytes;
    if (static_cast<int64_t>(tables.shape(1)) <= last) {
        fail("an entry has ", tables.shape(1), " pages, its states need ", last + 1);
    }
    for (size_t s = 0; s < tables.shape(0); ++s) {
        if (cu_seqlens.data()[s + 1] <= cu_seqlens.data()[s]) continue;
        const int32_t* pages = tables.data() + static_cast<int64_t>(s) * tables.stride(0);
        for (int64_t p = first; p <= last; ++p) {
            if (pages[p] < 1 || pages[p] >= place.num_blocks) {
                fail("page ", pages[p], " of a state lies outside pages 1 to ", place.num_blocks - 1);
            }
        }
    }
}

using IntsOut = Array<int32_t>;
using MaybeFloats = std::optional<Floats>;

template <class A, class B>
void require_same(const A& a, const char* name, const B& like, size_t ndim) {
    for (size_t i = 0; i < ndim; ++i) require_size(a, name, i, static_cast<int64_t>(like.shape(i)));
}

inline const float* optional_vector(Handle& h, const MaybeFloats& v, const char* name, int64_t size) {
    if (!v) return nullptr;
    require(*v, name, 1);
    require_size(*v, name, 0, size);
    h.keep(*v);
    return v->data();
}

inline const float* vector_of(Handle& h, const Floats& v, const char* name, int64_t size) {
    return optional_vector(h, MaybeFloats(v), name, size);
}

// The operations of families that need more than the common ones.
void bind_family_rows(nb::class_<Handle>& runtime);
void bind_states(nb::class_<Handle>& runtime);
void bind_grouped(nb::module_& m, nb::class_<Handle>& runtime);

}  // namespace kvern
