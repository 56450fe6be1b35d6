// Elementary functions on sixteen lanes.
#pragma once

namespace KVERN_PATH {

// 2^t within about 2 ulp for any t; NaN stays NaN, below -160 is 0, above 128 is infinity.
static inline F f_exp2_split(F t, F rest) {
    t = f_min(f_set1(129.0f), f_max(f_set1(-160.0f), t));  // this order lets NaN through
    const F n = f_round(t);
    const F r = f_add(f_sub(t, n), rest);
    F p = f_set1(1.535336188319500e-4f);  // minimax on [-1/2, 1/2]
    p = f_fma(p, r, f_set1(1.339887440266574e-3f));
    p = f_fma(p, r, f_set1(9.618437357674640e-3f));
    p = f_fma(p, r, f_set1(5.550332471162809e-2f));
    p = f_fma(p, r, f_set1(2.402264791363012e-1f));
    p = f_fma(p, r, f_set1(6.931472028550421e-1f));
    p = f_fma(p, r, f_set1(1.0f));
    return f_scale2(p, n);
}

static inline F f_exp2(F t) { return f_exp2_split(t, f_zero()); }

// 2^t for t <= 0; NaN stays NaN, below -126.5 is 0.
static inline F f_exp2_down(F t) {
    t = f_max(f_set1(-127.0f), t);  // this order lets NaN through
    const F n = f_round(t);
    const F r = f_sub(t, n);
    F p = f_set1(1.535336188319500e-4f);  // as in f_exp2_split
    p = f_fma(p, r, f_set1(1.339887440266574e-3f));
    p = f_fma(p, r, f_set1(9.618437357674640e-3f));
    p = f_fma(p, r, f_set1(5.550332471162809e-2f));
    p = f_fma(p, r, f_set1(2.402264791363012e-1f));
    p = f_fma(p, r, f_set1(6.931472028550421e-1f));
    p = f_fma(p, r, f_set1(1.0f));
    return f_mul(p, f_bits(i_shl<23>(i_add(i_from_f(n), i_set1(127)))));
}

// e^x: the rounding error of x * log2(e) is carried along, so large |x| lose nothing.
static inline F f_exp(F x) {
    const F log2e = f_set1(1.44269502162933349609375f);
    const F t = f_mul(x, log2e);
    const F inside = f_min(f_set1(100.0f), f_max(f_set1(-100.0f), x));  // no inf - inf below
    F rest = f_fma(inside, log2e, f_sub(f_zero(), f_mul(inside, log2e)));
    rest = f_fma(inside, f_set1(1.925963033500011e-08f), rest);
    return f_exp2_split(t, rest);
}

static inline F f_tanh(F x) {
    const F e = f_exp(f_mul(x, f_set1(2.0f)));
    return f_sub(f_set1(1.0f), f_div(f_set1(2.0f), f_add(e, f_set1(1.0f))));
}

static inline float exp2_scalar(float t) {
    float lanes[16];
    f_store(lanes, f_exp2(f_set1(t)));
    return lanes[0];
}

}  // namespace KVERN_PATH
