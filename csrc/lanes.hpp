// ATTENTION_LANES floats in the widest registers. Included once per instruction set.
#pragma once
#include "job.hpp"

#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace baracuda {
namespace {

#if defined(__AVX512F__)
constexpr int64_t REGISTER = 16;
#elif defined(__AVX__)
constexpr int64_t REGISTER = 8;
#else
constexpr int64_t REGISTER = 4;
#endif
using Register = float __attribute__((vector_size(REGISTER * sizeof(float))));
using Four = float __attribute__((vector_size(4 * sizeof(float))));

struct Sum {
    template <class V>
    ALWAYS_INLINE V operator()(V x, V y) const {
        return x + y;
    }
};
struct Greater {
    template <class V>
    ALWAYS_INLINE V operator()(V x, V y) const {
        return x < y ? y : x;
    }
};

// The upper half is joined with the lower until four are left.
template <class Join>
ALWAYS_INLINE Four quartered(Join, Four x) {
    return x;
}
#if defined(__AVX__)
template <class Join>
ALWAYS_INLINE Four quartered(Join join, __m256 x) {
    return join(Four(_mm256_castps256_ps128(x)), Four(_mm256_extractf128_ps(x, 1)));
}
#endif
#if defined(__AVX512F__)
template <class Join>
ALWAYS_INLINE Four quartered(Join join, __m512 x) {
    const __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1);
    using Eight = float __attribute__((vector_size(32)));
    return quartered(join, __m256(join(Eight(_mm512_castps512_ps256(x)), Eight(_mm256_castpd_ps(high)))));
}
#endif

struct Sixteen {
    static constexpr int PARTS = ATTENTION_LANES / REGISTER;
    Register part[PARTS];

    static ALWAYS_INLINE Sixteen at(const float* from) {
        Sixteen x;
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) memcpy(&x.part[i], from + i * REGISTER, sizeof(Register));
        return x;
    }
    template <class Join>
    ALWAYS_INLINE void join(Join join, const Sixteen& x) {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) part[i] = join(part[i], x.part[i]);
    }
    ALWAYS_INLINE void add(const Sixteen& x) { join(Sum{}, x); }
    ALWAYS_INLINE void add_product(const Sixteen& x, const Sixteen& y) {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) part[i] += x.part[i] * y.part[i];
    }
    ALWAYS_INLINE void add_product(float x, const Sixteen& y) {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) part[i] += x * y.part[i];
    }
    ALWAYS_INLINE void multiply(float x) {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) part[i] *= x;
    }
    ALWAYS_INLINE void store(float* to) const {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) memcpy(to + i * REGISTER, &part[i], sizeof(Register));
    }

    // The upper half of the lanes is joined with the lower until four are left.
    template <class Join>
    ALWAYS_INLINE Four quarter(Join join) const {
        Sixteen x = *this;
#pragma GCC unroll 4
        for (int half = PARTS / 2; half; half /= 2)
#pragma GCC unroll 4
            for (int i = 0; i < half; ++i) x.part[i] = join(x.part[i], x.part[i + half]);
        return quartered(join, x.part[0]);
    }
    // ... until one is.
    template <class Join>
    ALWAYS_INLINE float whole(Join join) const {
        const Four x = quarter(join);
        return join(join(x[0], x[2]), join(x[1], x[3]));
    }
};

// The numbers of two that are at these places, the second one's from 4 on.
template <int A, int B, int C, int D>
ALWAYS_INLINE Four picked(Four x, Four y) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, A, B, C, D);
#else
    using Places = int __attribute__((vector_size(16)));
    return __builtin_shuffle(x, y, Places{A, B, C, D});
#endif
}

// Of each of four, the sum of its lanes.
ALWAYS_INLINE Four halved(const Sixteen (&sums)[4]) {
    const Four a = sums[0].quarter(Sum{}), b = sums[1].quarter(Sum{}), c = sums[2].quarter(Sum{}), d = sums[3].quarter(Sum{});
    const Four ab = picked<0, 4, 1, 5>(a, b) + picked<2, 6, 3, 7>(a, b);
    const Four cd = picked<0, 4, 1, 5>(c, d) + picked<2, 6, 3, 7>(c, d);
    return picked<0, 1, 4, 5>(ab, cd) + picked<2, 3, 6, 7>(ab, cd);
}

// Four rows of four, `pitch` apart, become columns of rows that are `to_pitch` apart.
ALWAYS_INLINE void transpose_four(const float* from, int64_t pitch, float* to, int64_t to_pitch) {
    Four x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) memcpy(&x[i], from + i * pitch, sizeof x[i]);
    const Four low = picked<0, 4, 1, 5>(x[0], x[1]), low2 = picked<0, 4, 1, 5>(x[2], x[3]);
    const Four high = picked<2, 6, 3, 7>(x[0], x[1]), high2 = picked<2, 6, 3, 7>(x[2], x[3]);
    const Four columns[] = {picked<0, 1, 4, 5>(low, low2), picked<2, 3, 6, 7>(low, low2),
                            picked<0, 1, 4, 5>(high, high2), picked<2, 3, 6, 7>(high, high2)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) memcpy(to + i * to_pitch, &columns[i], sizeof columns[i]);
}

}  // namespace
}  // namespace baracuda
