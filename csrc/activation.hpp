// relu, gelu and silu of a linear's sums, the recipe of backends/activation.py line by line: every multiplication and
// addition rounded on its own, one division, no function of a library. Included once per instruction set.
#pragma once
#include "formulas.hpp"

namespace baracuda {
namespace {

// Coefficients with the highest power first.
template <class M>
struct Terms;

template <>
struct Terms<float> {
    using Bits = uint32_t;
    static constexpr int MANTISSA = 23;
    static constexpr Bits BIAS = 127, HEAD = ~Bits(0) << 12;
    static constexpr float LOG2E = 0x1.715476p+0f, LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
    static constexpr float MAGIC = 0x1.8p23f, GELU_LIMIT = 14.5f, SILU_LIMIT = 112;
    static constexpr float EXPONENTIAL[] = {0x1.65957p-10f, 0x1.123d04p-7f, 0x1.555be2p-5f, 0x1.5554a4p-3f,
                                            0x1.fffffep-2f};
    static constexpr float UPPER[] = {0x1.0efa14p-8f, 0x1.4de29ep-5f, 0x1.78051p-3f, 0x1.c15292p-2f, 0x1p-1f};
    static constexpr float LOWER[] = {0x1.539d88p-7f, 0x1.a27d22p-4f, 0x1.e1bbcap-2f, 0x1.343b7p+0f, 0x1.aceb7ap+0f,
                                      0x1p+0f};
};

template <>
struct Terms<double> {
    using Bits = uint64_t;
    static constexpr int MANTISSA = 52;
    static constexpr Bits BIAS = 1023, HEAD = ~Bits(0) << 27;
    static constexpr double LOG2E = 0x1.71547652b82fep+0, LN2_HIGH = 0x1.62e42fefa2p-1,
                            LN2_LOW = 0x1.9ef35793c7673p-41;
    static constexpr double MAGIC = 0x1.8p52, GELU_LIMIT = 39, SILU_LIMIT = 760;
    static constexpr double EXPONENTIAL[] = {0x1.af3a5f7cc56e2p-26, 0x1.2892e93100ed3p-22, 0x1.71de0cf59163ep-19,
                                             0x1.a019b7e0bf438p-16, 0x1.a01a01a7f3e28p-13, 0x1.6c16c178d97f0p-10,
                                             0x1.1111111110976p-7,  0x1.5555555553c9bp-5,  0x1.5555555555556p-3,
                                             0x1.0000000000001p-1};
    static constexpr double UPPER[] = {0x1.e18b76f4e05d0p-23, 0x1.d43ecc6679cc9p-18, 0x1.bf13b11ede36bp-14,
                                       0x1.1098871e9a093p-10, 0x1.d2dcd244e1342p-8,  0x1.243843a5ff354p-5,
                                       0x1.0e7392fab690dp-3,  0x1.6df11bb383b2ap-2,  0x1.5bf9087d18d78p-1,
                                       0x1.a7e7ce89b8a15p-1,  0x1p-1};
    static constexpr double LOWER[] = {0x1.2dc370fb0124fp-21, 0x1.256de21741925p-16, 0x1.18c0d7ecae6e1p-12,
                                       0x1.57f0cb328d94ep-9,  0x1.28ec0061bd564p-6,  0x1.78c6c32662fa1p-4,
                                       0x1.64b4513980cc0p-2,  0x1.f5d74912cca0fp-1,  0x1.0031dd5e1ec7fp+1,
                                       0x1.689669979950cp+1,  0x1.3a14fc142d29fp+1,  0x1p+0};
};

template <class M, size_t N>
ALWAYS_INLINE M polynomial(const M (&coefficients)[N], M x) {
    M total = coefficients[0];
#pragma GCC unroll 16
    for (size_t i = 1; i < N; ++i) total = total * x + coefficients[i];
    return total;
}

// exp(a - rest) for a <= 0 and a small rest: a number near 1 and two powers of two to multiply it with.
template <class M>
struct Exponential {
    using T = Terms<M>;
    M e, first, second;

    ALWAYS_INLINE Exponential(M a, M rest) {
        const M shifted = a * T::LOG2E + T::MAGIC, n = shifted - T::MAGIC;
        const M r = ((a - n * T::LN2_HIGH) - n * T::LN2_LOW) - rest;
        e = ((r * r) * polynomial(T::EXPONENTIAL, r) + r) + M(1);
        // The low bits of the shifted number are n, which is even or odd, and negative.
        const auto exponent = bits<typename T::Bits>(shifted) - bits<typename T::Bits>(T::MAGIC);
        const auto half = (exponent >> 1) | (exponent & ~(~typename T::Bits(0) >> 1));
        first = power(half), second = power(exponent - half);
    }
    static ALWAYS_INLINE M power(typename T::Bits exponent) { return bits<M>((exponent + T::BIAS) << T::MANTISSA); }
    ALWAYS_INLINE M scaled(M x) const { return (x * first) * second; }
};

template <class M>
ALWAYS_INLINE M limited(M y, M limit) {
    return magnitude(y) < limit ? magnitude(y) : limit;
}

template <class M>
ALWAYS_INLINE M gelu(M y) {
    using T = Terms<M>;
    const M z = limited(y, T::GELU_LIMIT), head = bits<M>(bits<typename T::Bits>(z) & T::HEAD);
    const Exponential<M> e((head * head) * M(-0.5), ((z - head) * (z + head)) * M(0.5));
    const M tail = e.scaled(((z * e.e) * polynomial(T::UPPER, z)) / polynomial(T::LOWER, z));
    return y < 0 ? -tail : y - tail;
}

template <class M>
ALWAYS_INLINE M silu(M y) {
    const M z = limited(y, Terms<M>::SILU_LIMIT);
    const Exponential<M> e(-z, M(0));
    const M quotient = (y < 0 ? -(z * e.e) : y) / (e.scaled(e.e) + M(1));
    return y < 0 ? e.scaled(quotient) : quotient;
}

template <class M>
inline void activate(int activation, M* y, int64_t n) {
    switch (activation) {
        case RELU:
            IVDEP for (int64_t i = 0; i < n; ++i) y[i] = y[i] < 0 ? M(0) : y[i];
            break;
        case GELU:
            IVDEP for (int64_t i = 0; i < n; ++i) y[i] = gelu(y[i]);
            break;
        case SILU:
            IVDEP for (int64_t i = 0; i < n; ++i) y[i] = silu(y[i]);
            break;
        default:
            break;
    }
}

}  // namespace
}  // namespace baracuda
