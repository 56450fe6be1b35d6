// How a register tile of a product's outputs is stored: one vector per group of 16 rows and token.
#pragma once

namespace KVERN_PATH {

using kvern::kGroupRows;
using kvern::MatmulOut;

static inline void store_outputs(F acc, const MatmulOut& out, int64_t at, int64_t rows_left) {
    if (rows_left >= kGroupRows) {
        f_store(out.to + at, acc);
        if (out.add_to) f_store(out.add_to + at, f_add(f_load(out.add_to + at), acc));
    } else if (rows_left > 0) {
        const int n = static_cast<int>(rows_left);
        f_store_n(out.to + at, acc, n);
        if (out.add_to) f_store_n(out.add_to + at, f_add(f_load_n(out.add_to + at, n), acc), n);
    }
}

// Token t's outputs of groups g and up.
template <int NG, int MT>
static inline void store_tile(const F (&acc)[MT][NG], const MatmulOut& out, int64_t t, int64_t g, int64_t num_rows) {
    for (int i = 0; i < MT; ++i) {
        for (int j = 0; j < NG; ++j) {
            const int64_t row = (g + j) * kGroupRows;
            store_outputs(acc[i][j], out, (t + i) * out.stride + row, num_rows - row);
        }
    }
}

}  // namespace KVERN_PATH
