// The formulas of the numerical contract, each written once. Included once per instruction set.
#pragma once
#include <type_traits>

#include "convert.hpp"

namespace baracuda {
namespace {

// How x meets its scale.
enum Division { DIVIDE, RECIPROCAL };

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool HAS_FMA = true;
#else
constexpr bool HAS_FMA = false;
#endif

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float magnitude(float x) { return __builtin_fabsf(x); }
inline double magnitude(double x) { return __builtin_fabs(x); }

// x / scale, correctly rounded, or x * r with r = 1 / scale.
template <int D, class M>
inline M divide(M x, M scale, M r) {
    return D == RECIPROCAL ? x * r : x / scale;
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

// One zero point for all: fewer loads.
template <class M>
struct EachScale : Each<M> {
    int32_t only;
    int32_t zero_point(int64_t) const { return only; }
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

// -- without a division ------------------------------------------------------------------------------------------

// Adding and subtracting it rounds what is below 2**22 in magnitude; its lowest byte is 0.
constexpr float ROUNDER = 0x1.8p23f;

// One scale and one range for a run. x is clamped where the quotient would be: low * scale, rounded, still divides to
// low while that is small. Then the quotient x * r gets one Newton step, which makes it round to the same integer as the
// division; nothing that decides can underflow or overflow between these bounds of the scale.
struct Corrected {
    float s, r, low, high;
    int32_t zp;

    static bool possible(float s, int32_t zp) {
        return HAS_FMA && s >= 0x1p-100f && s <= 0x1p100f && zp > -(1 << 21) && zp < 1 << 21;
    }
    Corrected(const One<float>& one, int q_min, int q_max)
        : s(one.s), r(one.r), low(float(q_min - one.zp) * s), high(float(q_max - one.zp) * s), zp(one.zp) {}

    float with_rounder(float x) const {
        x = x > low ? x : low;
        x = x < high ? x : high;
        float q = x * r;
        return fused(fused(-q, s, x), r, q) + ROUNDER;
    }
};

template <class X>
inline void quantize_corrected(const X* x, uint8_t* q, int64_t n, const Corrected c) {
    const uint32_t zp = uint32_t(c.zp);
    IVDEP for (int64_t i = 0; i < n; ++i) q[i] = uint8_t(bits<uint32_t>(c.with_rounder(x[i])) + zp);
}

// The difference is never -0, and the product never NaN.
template <class X>
inline void fake_quantize_corrected(const X* x, X* y, int64_t n, const Corrected c) {
    IVDEP for (int64_t i = 0; i < n; ++i) y[i] = (c.with_rounder(x[i]) - ROUNDER) * c.s;
}

// Two bf16 at a time, as the halves of an integer: widened and put back without moving lanes.
inline void quantize_corrected(const Bf16* x, uint8_t* q, int64_t n, const Corrected c) {
    const uint32_t zp = uint32_t(c.zp);
    IVDEP for (int64_t i = 0; i < n / 2; ++i) {
        uint32_t pair;
        memcpy(&pair, x + 2 * i, 4);
        const uint32_t first = bits<uint32_t>(c.with_rounder(bits<float>(pair << 16))) + zp;
        const uint32_t second = bits<uint32_t>(c.with_rounder(bits<float>(pair & 0xffff0000u))) + zp;
        const uint16_t both = uint16_t((first & 255) | second << 8);
        memcpy(q + 2 * i, &both, 2);
    }
    if (n % 2) quantize_corrected<Bf16>(x + n - 1, q + n - 1, 1, c);
}

// A finite scale never makes a NaN.
template <class I, class M, class X>
inline void dequantize_finite(const uint8_t* q, X* y, int64_t n, const One<M> one) {
    IVDEP for (int64_t i = 0; i < n; ++i) y[i] = M(int32_t(I(q[i])) - one.zp) * one.s;
}

#if defined(__AVX512BW__)
constexpr bool HAS_LOOKUP = true;

// y[i] = table[q[i] % 32], or % 16 where the table fills a vector with that.
inline void look_up(const Bf16* table, const uint8_t* q, Bf16* y, int64_t n) {
    const __m512i values = _mm512_loadu_si512(table);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m512i at = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + i)));
        _mm512_storeu_si512(y + i, _mm512_permutexvar_epi16(at, values));
    }
    for (; i < n; ++i) y[i].h = table[q[i] % 32].h;
}

inline void look_up(const float* table, const uint8_t* q, float* y, int64_t n) {
    const __m512 values = _mm512_loadu_ps(table);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i)));
        _mm512_storeu_ps(y + i, _mm512_permutexvar_ps(at, values));
    }
    for (; i < n; ++i) y[i] = table[q[i] % 16];
}
#else
constexpr bool HAS_LOOKUP = false;
template <class X>
inline void look_up(const X*, const uint8_t*, X*, int64_t) {}
#endif

// The least and the greatest x whose steps are in range: for a long run, two comparisons instead of a division each.
template <class M>
struct Passes {
    using I = std::conditional_t<sizeof(M) == 4, int32_t, int64_t>;
    M low, high;

    static bool possible(M s, int32_t zp) {
        const M limit = sizeof(M) == 4 ? M(0x1p100) : M(0x1p500);
        return s >= 1 / limit && s <= limit && zp > -(1 << 21) && zp < 1 << 21;
    }
    // One float further from (away) or closer to zero; the start is never so close that it would cross it.
    static M moved(M x, bool away) { return bits<M>(I(bits<I>(x) + (away ? 1 : -1))); }

    Passes() : low(0), high(0) {}
    Passes(const One<M>& one, int q_min, int q_max) {
        const M first = M(q_min - one.zp), last = M(q_max - one.zp);
        auto enough = [&](M x) { return rounded(x / one.s) >= first; };
        auto few = [&](M x) { return rounded(x / one.s) <= last; };
        low = (first - M(0.5)) * one.s, high = (last + M(0.5)) * one.s;
        while (!enough(low)) low = moved(low, low > 0);
        while (enough(moved(low, low < 0))) low = moved(low, low < 0);
        while (!few(high)) high = moved(high, high < 0);
        while (few(moved(high, high > 0))) high = moved(high, high > 0);
    }
    bool operator()(M x) const { return (low <= x) & (x <= high); }
};

template <class M, class X>
inline void backward(bool divides, const X* x, const X* dy, X* y, int64_t n, const One<M> one, const Passes<M> passes) {
    if (divides) {
        IVDEP for (int64_t i = 0; i < n; ++i) {
            M g = dy[i] / one.s;
            y[i] = canonical(passes(x[i]) ? g : M(0));
        }
    } else {
        IVDEP for (int64_t i = 0; i < n; ++i) y[i] = canonical(passes(x[i]) ? M(dy[i]) : M(0));
    }
}

// -- a tile ------------------------------------------------------------------------------------------------------

// The buffers of one tile: floats in the math type or as stored, integers one a byte. An output may be one of the inputs.
template <class X>
struct Span {
    const X *x, *dy;
    const uint8_t* q;
    X* y;
    uint8_t* q_out;
    int64_t n;
};

template <int D, class M, class X, class P>
__attribute__((noinline)) void apply(const Problem& problem, const Span<X>& span, const P& parameters) {
    const P p = parameters;  // a local that no store to a byte can seem to change
    const int q_min = problem.q_min, q_max = problem.q_max;
    const X *x = span.x, *dy = span.dy;
    const uint8_t* q = span.q;
    X* y = span.y;
    uint8_t* q_out = span.q_out;
    const int64_t n = span.n;
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
                y[i] = canonical((steps<D, M>(x[i], p, i, q_min, q_max) + M(0)) * p.scale(i));
            break;
        case QUANTIZE_BACKWARD:
            IVDEP for (int64_t i = 0; i < n; ++i) {
                M g = divide<D, M>(dy[i], p.scale(i), p.inverse(i));
                y[i] = canonical(in_range<D, M>(x[i], p, i, q_min, q_max) ? g : M(0));
            }
            break;
        case DEQUANTIZE_BACKWARD:
            IVDEP for (int64_t i = 0; i < n; ++i) y[i] = canonical(M(dy[i]) * p.scale(i));
            break;
        case FAKE_QUANTIZE_BACKWARD:
            IVDEP for (int64_t i = 0; i < n; ++i)
                y[i] = canonical(in_range<D, M>(x[i], p, i, q_min, q_max) ? M(dy[i]) : M(0));
            break;
        default:  // QUANTIZE, and the second half of DYNAMIC_QUANTIZE
            IVDEP for (int64_t i = 0; i < n; ++i)
                q_out[i] = uint8_t(int32_t(steps<D, M>(x[i], p, i, q_min, q_max)) + p.zero_point(i));
    }
}

}  // namespace
}  // namespace baracuda
