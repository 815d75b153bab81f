// The formulas of the numerical contract, each written once. Included once per instruction set.
#pragma once
#include "convert.hpp"

namespace baracuda {
namespace {

// How x meets its scale. CORRECTED gives the same steps as DIVIDE without a division, where `correctable` says so.
enum Division { DIVIDE, RECIPROCAL, CORRECTED };

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool HAS_FMA = true;
#else
constexpr bool HAS_FMA = false;
#endif

// Inside these bounds no product or remainder that decides a step can underflow or overflow.
inline bool correctable(float scale) { return HAS_FMA && scale >= 0x1p-100f && scale <= 0x1p100f; }
inline bool correctable(double) { return false; }

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float magnitude(float x) { return __builtin_fabsf(x); }
inline double magnitude(double x) { return __builtin_fabs(x); }

// x / scale (r is 1 / scale). Corrected: one Newton step on the quotient; beyond 2**25 every clamp has decided already.
template <int D, class M>
inline M divide(M x, M scale, M r) {
    if (D == DIVIDE) return x / scale;
    M q = x * r;
    if (D == RECIPROCAL) return q;
    M corrected = fused(fused(-q, scale, x), r, q);
    return magnitude(q) < M(0x1p25) ? corrected : q;
}

// Ties to even. Without an instruction for it, adding and subtracting 2**23 (2**52) rounds what has a fraction.
#if defined(__SSE4_1__) || !defined(__SSE2__)
inline float rounded(float x) { return __builtin_rintf(x); }
inline double rounded(double x) { return __builtin_rint(x); }
#else
inline float rounded(float x) {
    float big = bits<float>((bits<uint32_t>(x) & 0x80000000u) | 0x4b000000u);
    float y = (x + big) - big;
    return magnitude(x) < 0x1p23f ? y : x;
}
inline double rounded(double x) {
    double big = bits<double>((bits<uint64_t>(x) & 0x8000000000000000ull) | 0x4330000000000000ull);
    double y = (x + big) - big;
    return magnitude(x) < 0x1p52 ? y : x;
}
#endif

// The scale and zero point of element i: one for all, or one each. r is 1 / s.
template <class M>
struct One {
    M s, r;
    int32_t zp;
    M scale(int64_t) const { return s; }
    M inverse(int64_t) const { return r; }
    int32_t zero_point(int64_t) const { return zp; }
};

template <class M>
struct Each {
    const M *s, *r;
    const int32_t* zp;
    M scale(int64_t i) const { return s[i]; }
    M inverse(int64_t i) const { return r[i]; }
    int32_t zero_point(int64_t i) const { return zp[i]; }
};

// Clamped before it is rounded: the bounds are integers, so the order does not matter. NaN fails both comparisons
// of the first line and takes the lower bound.
template <int D, class M, class P>
inline M steps(M x, const P& p, int64_t i, int q_min, int q_max) {
    M low = M(q_min - p.zero_point(i)), high = M(q_max - p.zero_point(i));
    M t = divide<D>(x, p.scale(i), p.inverse(i));
    t = t > low ? t : low;
    t = t < high ? t : high;
    return rounded(t);
}

template <int D, class M, class P>
inline bool in_range(M x, const P& p, int64_t i, int q_min, int q_max) {
    M low = M(q_min - p.zero_point(i)), high = M(q_max - p.zero_point(i));
    M t = rounded(divide<D>(x, p.scale(i), p.inverse(i)));
    return (low <= t) & (t <= high);
}

// The buffers of one tile: floats in the math type, integers one a byte. An output may be one of the inputs.
template <class M>
struct Span {
    const M *x, *dy;
    const uint8_t* q;
    M* y;
    uint8_t* q_out;
    int64_t n;
};

template <int D, class M, class P>
inline void apply(const Problem& problem, const Span<M>& span, P p) {
    const int q_min = problem.q_min, q_max = problem.q_max;
    const M *x = span.x, *dy = span.dy;
    const uint8_t* q = span.q;
    M* y = span.y;
    uint8_t* q_out = span.q_out;
    const int64_t n = span.n;
    // A gradient is divided for good: the correction is exact only where rounding and clamping follow.
    constexpr int GRADIENT = D == CORRECTED ? int(DIVIDE) : D;
    switch (problem.op) {
        case DEQUANTIZE:
            if (problem.quantized == U8) {
                IVDEP for (int64_t i = 0; i < n; ++i)
                    y[i] = canonical(M(int32_t(q[i]) - p.zero_point(i)) * p.scale(i));
            } else {
                IVDEP for (int64_t i = 0; i < n; ++i)
                    y[i] = canonical(M(int32_t(int8_t(q[i])) - p.zero_point(i)) * p.scale(i));
            }
            break;
        case FAKE_QUANTIZE:  // adding 0 turns -0 into 0
            IVDEP for (int64_t i = 0; i < n; ++i)
                y[i] = canonical((steps<D>(x[i], p, i, q_min, q_max) + M(0)) * p.scale(i));
            break;
        case QUANTIZE_BACKWARD:
            IVDEP for (int64_t i = 0; i < n; ++i) {
                M g = divide<GRADIENT>(dy[i], p.scale(i), p.inverse(i));
                y[i] = canonical(in_range<D>(x[i], p, i, q_min, q_max) ? g : M(0));
            }
            break;
        case DEQUANTIZE_BACKWARD:
            IVDEP for (int64_t i = 0; i < n; ++i) y[i] = canonical(dy[i] * p.scale(i));
            break;
        case FAKE_QUANTIZE_BACKWARD:
            IVDEP for (int64_t i = 0; i < n; ++i)
                y[i] = canonical(in_range<D>(x[i], p, i, q_min, q_max) ? dy[i] : M(0));
            break;
        default:  // QUANTIZE, and the second half of DYNAMIC_QUANTIZE
            IVDEP for (int64_t i = 0; i < n; ++i)
                q_out[i] = uint8_t(int32_t(steps<D>(x[i], p, i, q_min, q_max)) + p.zero_point(i));
    }
}

}  // namespace
}  // namespace baracuda
