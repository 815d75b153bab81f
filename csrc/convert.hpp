// Between storage types and the math types (float, double). Included once per instruction set.
#pragma once
#include <cstring>

#include "job.hpp"
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define IVDEP _Pragma("GCC ivdep")

namespace baracuda {
namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a change of view, not of size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

// Every NaN becomes the one quiet NaN, whatever the hardware made of sign and payload.
inline float canonical(float y) { return y != y ? bits<float>(0x7fc00000u) : y; }
inline double canonical(double y) { return y != y ? bits<double>(0x7ff8000000000000ull) : y; }

inline float from_bf16(uint16_t h) { return bits<float>(uint32_t(h) << 16); }

// In the upper half. A NaN must be canonical already.
inline uint32_t rounded_to_bf16(float x) {
    uint32_t u = bits<uint32_t>(x);
    return u + 0x7fff + ((u >> 16) & 1);
}

inline uint16_t to_bf16(float x) { return uint16_t(rounded_to_bf16(canonical(x)) >> 16); }

// A stored bf16 where a loop expects a float: it is widened and narrowed in a register. What is assigned must be
// canonical already.
struct Bf16 {
    uint16_t h;
    operator float() const { return from_bf16(h); }
    Bf16& operator=(float x) {
        h = uint16_t(rounded_to_bf16(x) >> 16);
        return *this;
    }
};

// Calls body(M(), X()) with the types the element is computed and held in.
template <class Body>
inline void by_element(int element, Body body) {
    if (element == F64) return body(double(), double());
    if (element == BF16) return body(float(), Bf16());
    body(float(), float());
}

// Exact, subnormals included: the exponent is moved by a multiplication with a power of two.
inline float from_f16(uint16_t h) {
    uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
    uint32_t value = bits<uint32_t>(bits<float>(magnitude) * bits<float>(0x77800000u));
    value = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : value;
    return bits<float>(value | uint32_t(h & 0x8000) << 16);
}

// To nearest even: below 2**-14 an addition aligns the mantissa and rounds, above it the integer carry does.
inline uint16_t to_f16(float x) {
    uint32_t u = bits<uint32_t>(canonical(x));
    uint32_t sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    uint32_t small = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;
    uint32_t huge = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t value = magnitude < 0x38800000u ? small : normal;
    return uint16_t(sign | (magnitude >= 0x47800000u ? huge : value));
}

inline void widen_f16(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    IVDEP for (; i < n; ++i) to[i] = from_f16(from[i]);
}

// The kernels hand over canonical NaNs, which every one of these keeps canonical.
inline void narrow_f16(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    IVDEP for (; i < n; ++i) to[i] = to_f16(from[i]);
}

inline void widen_bf16(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
        const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
        _mm512_storeu_si512(to + i, _mm512_slli_epi32(x, 16));
    }
#endif
    IVDEP for (; i < n; ++i) to[i] = from_bf16(from[i]);
}

inline void narrow_bf16(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512i half = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1);
    for (; i + 16 <= n; i += 16) {
        const __m512i x = _mm512_loadu_si512(from + i), odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), one);
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(x, half), odd), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi32_epi16(rounded));
    }
#endif
    IVDEP for (; i < n; ++i) to[i] = to_bf16(from[i]);
}

template <class M>
inline void widen(int code, const char* data, int64_t first, int64_t n, M* to) {
    if constexpr (sizeof(M) == 2) {
        memcpy(to, data + first * 2, n * 2);
    } else if (code == F16) {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(data) + first;
        if constexpr (sizeof(M) == 4) {
            widen_f16(from, to, n);
        } else {
            for (int64_t i = 0; i < n; ++i) to[i] = from_f16(from[i]);
        }
    } else if (code == BF16) {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(data) + first;
        if constexpr (sizeof(M) == 4) {
            widen_bf16(from, to, n);
        } else {
            for (int64_t i = 0; i < n; ++i) to[i] = from_bf16(from[i]);
        }
    } else if (code == F32) {
        const float* from = reinterpret_cast<const float*>(data) + first;
        IVDEP for (int64_t i = 0; i < n; ++i) to[i] = M(from[i]);
    } else {
        const double* from = reinterpret_cast<const double*>(data) + first;
        IVDEP for (int64_t i = 0; i < n; ++i) to[i] = M(from[i]);
    }
}

template <class M>
inline void narrow(int code, const M* from, int64_t n, char* to) {
    if (code == F16) {
        if constexpr (sizeof(M) == 4) narrow_f16(from, reinterpret_cast<uint16_t*>(to), n);
    } else if (code == BF16) {
        if constexpr (sizeof(M) == 4) narrow_bf16(from, reinterpret_cast<uint16_t*>(to), n);
    } else {
        memcpy(to, from, n * sizeof(M));
    }
}

// One value of a stored scale, in the math type.
template <class M>
inline M widened(int code, const void* data, int64_t i) {
    M value;
    widen<M>(code, static_cast<const char*>(data), i, 1, &value);
    return value;
}

// q holds one element a byte, the first at an even index; an odd tail is padded with 0.
inline void pack(const uint8_t* q, int64_t n, uint8_t* to) {
    IVDEP for (int64_t i = 0; i < n / 2; ++i) to[i] = uint8_t((q[2 * i] & 15) | q[2 * i + 1] << 4);
    if (n % 2) to[n / 2] = q[n - 1] & 15;
}

inline void unpack(const uint8_t* from, int64_t n, bool is_signed, uint8_t* q) {
    const uint8_t flip = is_signed ? 8 : 0;
    IVDEP for (int64_t i = 0; i < n / 2; ++i) {
        q[2 * i] = uint8_t(((from[i] & 15) ^ flip) - flip);
        q[2 * i + 1] = uint8_t(((from[i] >> 4) ^ flip) - flip);
    }
    if (n % 2) q[n - 1] = uint8_t(((from[n / 2] & 15) ^ flip) - flip);
}

// Stores that pass the cache by: the lines of a large output need not be read before they are overwritten.
inline void stream(char* to, const char* from, int64_t n) {
#if defined(__SSE2__)
    int64_t head = least(n, -reinterpret_cast<intptr_t>(to) & 63);
    memcpy(to, from, head);
    int64_t i = head;
    for (; i + 64 <= n; i += 64) {
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#else
        for (int64_t j = i; j < i + 64; j += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + j),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
#endif
    }
    memcpy(to + i, from + i, n - i);
#else
    memcpy(to, from, n);
#endif
}

inline void stream_end() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace
}  // namespace baracuda
