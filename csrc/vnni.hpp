// The integer product with vpdpbusd, which adds four products of an unsigned and a signed byte to a 32-bit sum.
//
// The weights are the unsigned side: w + 128, or w + 8 of 4-bit ones. What that adds is 128 or 8 times the sum of the
// activations, which is known before a weight is read; in groups with factors, the sum of each group times its factor.
// All sums are modulo 2**32; the result fits 32 bits, so it is exact.
#pragma once
#include <immintrin.h>

#include "linear.hpp"

#define BARACUDA_VNNI

namespace baracuda {
namespace {

constexpr int64_t AHEAD = 2048;       // bytes of a row that are fetched before they are read
constexpr int64_t LANE_WEIGHTS = 32;  // the 4-bit weights of 16 bytes: the lanes that shuffles work in, of one group each

inline int32_t word(const uint8_t* four) {
    int32_t value;
    memcpy(&value, four, 4);
    return value;
}

#if defined(__AVX512VNNI__) && !defined(BARACUDA_NARROW)
struct Vector {
    using V = __m512i;
    static constexpr int64_t BYTES = 64;
    static constexpr int TOKENS = 4;  // whose sums for four columns stay in registers
    static V zero() { return _mm512_setzero_si512(); }
    static V all(int byte) { return _mm512_set1_epi8(char(byte)); }
    static V load(const void* from) { return _mm512_loadu_si512(from); }
    static V load(const void* from, int64_t n) { return _mm512_maskz_loadu_epi8(~uint64_t(0) >> (BYTES - n), from); }
    static V dot(V sum, V u, V s) { return _mm512_dpbusd_epi32(sum, u, s); }
    static V flip(V x) { return _mm512_xor_si512(x, all(-128)); }
    static V low(V x) { return _mm512_ternarylogic_epi32(x, all(8), all(15), 0x28); }  // (x ^ 8) & 15
    static V high(V x) { return low(_mm512_srli_epi16(x, 4)); }
    static V times(V pairs, V factors) { return _mm512_mullo_epi16(pairs, factors); }
    static V chosen(const uint8_t* four, V places) { return _mm512_shuffle_epi8(_mm512_set1_epi32(word(four)), places); }
    static void store(void* to, V x) { _mm512_storeu_si512(to, x); }
    static V masked(V x, int byte) { return _mm512_and_si512(x, all(byte)); }
    static V minus_products(V from, const uint8_t* factors, const int32_t* sums) {
        const V f = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(factors)));
        return _mm512_sub_epi32(from, _mm512_mullo_epi32(f, load(sums)));
    }
    static __m128i sum(V a, V b, V c, V d) {
        const V ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const V cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        const V four = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
        return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }
};
#else
struct Vector {
    using V = __m256i;
    static constexpr int64_t BYTES = 32;
    static constexpr int TOKENS = 2;
    static V zero() { return _mm256_setzero_si256(); }
    static V all(int byte) { return _mm256_set1_epi8(char(byte)); }
    static V load(const void* from) { return _mm256_loadu_si256(static_cast<const V*>(from)); }
    static V load(const void* from, int64_t n) {
        alignas(32) char bytes[BYTES] = {};
        memcpy(bytes, from, n);
        return load(bytes);
    }
#if defined(__AVXVNNI__)
    static V dot(V sum, V u, V s) { return _mm256_dpbusd_avx_epi32(sum, u, s); }
#else
    static V dot(V sum, V u, V s) { return _mm256_dpbusd_epi32(sum, u, s); }
#endif
    static V flip(V x) { return _mm256_xor_si256(x, all(-128)); }
    static V low(V x) { return _mm256_and_si256(_mm256_xor_si256(x, all(8)), all(15)); }
    static V high(V x) { return low(_mm256_srli_epi16(x, 4)); }
    static V times(V pairs, V factors) { return _mm256_mullo_epi16(pairs, factors); }
    static V chosen(const uint8_t* four, V places) { return _mm256_shuffle_epi8(_mm256_set1_epi32(word(four)), places); }
    static void store(void* to, V x) { _mm256_storeu_si256(static_cast<V*>(to), x); }
    static V masked(V x, int byte) { return _mm256_and_si256(x, all(byte)); }
    static V minus_products(V from, const uint8_t* factors, const int32_t* sums) {
        const V f = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(factors)));
        return _mm256_sub_epi32(from, _mm256_mullo_epi32(f, load(sums)));
    }
    static __m128i sum(V a, V b, V c, V d) {
        const V four = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        return _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    }
};
#endif
using V = Vector::V;

// As the shifted activations see it.
inline int32_t shifted_zero_point(const Epilogue& e, const Dot& dot, int64_t m) {
    return row_zero_point(e, m) - (dot.a_unsigned ? 128 : 0);
}

// Whether any row has a zero point to be taken out of the sums.
inline bool has_zero_points(const Epilogue& e, const Dot& dot) {
    bool any = false;
    for (int64_t m = 0; m < e.m; ++m) any |= shifted_zero_point(e, dot, m) != 0;
    return any;
}

// Whether that needs sums of the weights which are not given.
inline bool sums_weights(const Epilogue& e, const Dot& dot) { return !e.weight_sum && has_zero_points(e, dot); }

// Signed activations, rows padded with zeros to whole vectors; beside packed weights, the even ones of a vector come
// first, then the odd ones. Before them the sums of the activations, and a row of ones, which sums up weights where that
// is wanted. Of weights in groups, 8 times the sums of each group, and the places of a vector's lanes among the groups
// from its first one on.
struct Prepared {
    int32_t *sums, *group_sums, *first_groups;
    int8_t *places, *ones, *a;
    int64_t bytes, pitch;                 // of a row of weights, and of activations
    int64_t groups = 0, sums_pitch = 0;  // of a row of weights, and the distance of two rows of their sums

    Prepared(const Epilogue& e, const Dot& dot) {
        bytes = dot.w_packed ? packed(e.k) : e.k;
        const int64_t vectors = (bytes + BYTES - 1) / BYTES;
        pitch = vectors * BYTES * (dot.w_packed ? 2 : 1);
        sums = reinterpret_cast<int32_t*>(dot.prepared);
        ones = reinterpret_cast<int8_t*>(sums + (e.m + 15) / 16 * 16);
        a = ones + pitch;
        places = a + e.m * pitch;
        group_sums = first_groups = nullptr;
        if (!dot.factor) return;
        groups = e.k / dot.group, sums_pitch = (groups + 15) / 16 * 16;
        group_sums = reinterpret_cast<int32_t*>(places + vectors * BYTES);
        first_groups = group_sums + (e.m + 1) * sums_pitch;
    }

    // Of row m; those of the ones come before the first.
    int8_t* row(int64_t m) const { return a + m * pitch; }
    int32_t* sums_of(int64_t m) const { return group_sums + (m + 1) * sums_pitch; }

    void fill(const Epilogue& e, const Dot& dot) const {
        const uint8_t flip = dot.a_unsigned ? 0x80 : 0;
        if (sums_weights(e, dot)) add_row(-1, e.k, dot, [](int64_t) { return int8_t(1); });
        for (int64_t m = 0; m < e.m; ++m) {
            const uint8_t* from = reinterpret_cast<const uint8_t*>(dot.a) + m * dot.a_pitch;
            int32_t sum = 0;
            for (int64_t i = 0; i < e.k; ++i) sum += int8_t(from[i] ^ flip);
            sums[m] = sum;
            add_row(m, e.k, dot, [=](int64_t i) { return int8_t(from[i] ^ flip); });
        }
        if (!dot.factor) return;
        constexpr int64_t LANES = BYTES / 16;
        const int64_t lanes = pitch / LANE_WEIGHTS;
        for (int64_t i = 0; i < lanes; ++i) {
            const int64_t group = least(i * LANE_WEIGHTS, e.k - 1) / dot.group;
            if (i % LANES == 0) first_groups[i / LANES] = int32_t(group);
            const int place = int(group - first_groups[i / LANES]) | 0x8000;  // a 16-bit factor: zero above it
            for (int64_t j = 0; j < 16; j += 2) memcpy(places + i * 16 + j, &place, 2);
        }
    }

private:
    static constexpr int64_t BYTES = Vector::BYTES;

    template <class Value>
    void add_row(int64_t m, int64_t k, const Dot& dot, Value value) const {
        arrange(row(m), k, dot.w_packed, value);
        for (int64_t g = 0; g < sums_pitch; ++g) {
            int32_t sum = 0;
            for (int64_t i = g * dot.group; i < least(k, (g + 1) * dot.group); ++i) sum += value(i);
            sums_of(m)[g] = 8 * sum;
        }
    }

    template <class Value>
    void arrange(int8_t* to, int64_t k, bool pairs, Value value) const {
        int64_t i = 0;
        if (pairs) {
            for (; i + 2 * BYTES <= k; i += 2 * BYTES) {
                IVDEP for (int64_t j = 0; j < BYTES; ++j) to[i + j] = value(i + 2 * j);
                IVDEP for (int64_t j = 0; j < BYTES; ++j) to[i + BYTES + j] = value(i + 2 * j + 1);
            }
            memset(to + i, 0, pitch - i);
            for (int64_t j = i; j < k; ++j) to[i + (j - i) / 2 + j % 2 * BYTES] = value(j);
        } else {
            IVDEP for (; i < k; ++i) to[i] = value(i);
            memset(to + i, 0, pitch - i);
        }
    }
};

// How a vector of stored bytes becomes PARTS vectors of unsigned bytes; `at` counts vectors from the start of row r of
// the four that were entered. start() is minus the biases of all groups; what remains is BIAS times the sum of the
// activations, which the caller subtracts.
struct Bytes {
    static constexpr int PARTS = 1, BIAS = 128;
    explicit Bytes(const Prepared&) {}
    void enter(int, const Dot&, int64_t) {}
    V start(int, const int32_t*) const { return Vector::zero(); }
    void read(int, int64_t, V stored, V* parts) const { parts[0] = Vector::flip(stored); }
};

struct Nibbles {
    static constexpr int PARTS = 2, BIAS = 8;
    explicit Nibbles(const Prepared&) {}
    void enter(int, const Dot&, int64_t) {}
    V start(int, const int32_t*) const { return Vector::zero(); }
    void read(int, int64_t, V stored, V* parts) const {
        parts[0] = Vector::low(stored);
        parts[1] = Vector::high(stored);
    }
};

// factor * (w + 8) is 225 at most: two bytes are multiplied as one 16-bit number, and neither carries into the other.
struct Groups {
    static constexpr int PARTS = 2, BIAS = 0;
    static constexpr int64_t MOST = NARROW_K / LANE_WEIGHTS + Vector::BYTES;  // of a row, and room to read behind them
    const Prepared& prepared;
    alignas(64) uint8_t factors[4][MOST];

    explicit Groups(const Prepared& prepared) : prepared(prepared) {}

    void enter(int r, const Dot& dot, int64_t row) {
        constexpr int64_t BYTES = Vector::BYTES;
        const uint8_t* from = dot.factor + row * dot.factor_pitch;
        for (int64_t g = 0; g < prepared.groups; g += BYTES)
            Vector::store(factors[r] + g, Vector::masked(Vector::load(from + g, least(BYTES, prepared.groups - g)), 15));
    }
    V start(int r, const int32_t* sums) const {
        constexpr int64_t AT_ONCE = Vector::BYTES / 4;
        V from = Vector::minus_products(Vector::zero(), factors[r], sums);
        for (int64_t g = AT_ONCE; g < prepared.groups; g += AT_ONCE)
            from = Vector::minus_products(from, factors[r] + g, sums + g);
        return from;
    }
    void read(int r, int64_t at, V stored, V* parts) const {
        const V places = Vector::load(prepared.places + at * Vector::BYTES);
        const V factor = Vector::chosen(factors[r] + prepared.first_groups[at], places);
        parts[0] = Vector::times(Vector::low(stored), factor);
        parts[1] = Vector::times(Vector::high(stored), factor);
    }
};

// The sums of four rows of weights with N rows of activations; with the sums of the weights themselves where asked for.
template <int N, bool SUMS, class Format>
ALWAYS_INLINE void product_of_four(const Format& format, const char* const w[4], const Prepared& prepared, int64_t m,
                                   __m128i out[N], __m128i& weight_sums) {
    constexpr int64_t BYTES = Vector::BYTES, PARTS = Format::PARTS;
    const int64_t bytes = prepared.bytes, pitch = prepared.pitch;
    const int8_t *a = prepared.row(m), *ones = prepared.ones;
    V acc[N][4], sums[4];
#pragma GCC unroll 4
    for (int r = 0; SUMS && r < 4; ++r) sums[r] = format.start(r, prepared.sums_of(-1));
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) acc[t][r] = format.start(r, prepared.sums_of(m + t));
    auto add = [&](int r, int64_t i, V stored) __attribute__((always_inline)) {
        V parts[PARTS];
        format.read(r, i / BYTES, stored, parts);
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) {
            if (SUMS) sums[r] = Vector::dot(sums[r], parts[p], Vector::load(ones + i * PARTS + p * BYTES));
#pragma GCC unroll 4
            for (int t = 0; t < N; ++t)
                acc[t][r] = Vector::dot(acc[t][r], parts[p], Vector::load(a + t * pitch + i * PARTS + p * BYTES));
        }
    };
    const int64_t whole = bytes / BYTES * BYTES;
    for (int64_t i = 0; i < whole; i += BYTES) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            __builtin_prefetch(w[r] + i + AHEAD);
            add(r, i, Vector::load(w[r] + i));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4 && whole < bytes; ++r) add(r, whole, Vector::load(w[r] + whole, bytes - whole));
    for (int t = 0; t < N; ++t) out[t] = Vector::sum(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
    if (SUMS) weight_sums = Vector::sum(sums[0], sums[1], sums[2], sums[3]);
}

// A processor fetches ahead only so far in one place, but in several places at once: rows of weights are multiplied four
// at a time that lie `apart`. These are the fours from `begin` to `end`, of `width` rows from `first` on.
struct Fours {
    int64_t first, width, apart, begin, end;
};

template <class Sums>
class VectorProduct {
    const Epilogue& e;
    const Dot& dot;
    const Prepared prepared;
    const bool moved_, sums_weights_;

public:
    VectorProduct(const Epilogue& e, const Dot& dot)
        : e(e), dot(dot), prepared(e, dot), moved_(has_zero_points(e, dot)), sums_weights_(sums_weights(e, dot)) {}

    void operator()(int64_t m, int64_t tokens, int64_t first, Sums acc) const {
        const int64_t apart = (acc.width + 3) / 4;
        // More tokens than registers take read the same four rows again, from the nearest cache.
        const int64_t step = tokens <= Vector::TOKENS ? apart : 1;
        for (int64_t c = 0; c < apart; c += step) {
            const Fours fours{first, acc.width, apart, c, c + step};
            if (!dot.w_packed) {
                by_sums<Bytes>(fours, m, tokens, acc);
            } else if (!dot.factor) {
                by_sums<Nibbles>(fours, m, tokens, acc);
            } else {
                by_sums<Groups>(fours, m, tokens, acc);
            }
        }
    }

private:
    template <class Format>
    void by_sums(const Fours& fours, int64_t m, int64_t tokens, Sums acc) const {
        if (sums_weights_) return by_tokens<true, Format>(fours, m, tokens, acc);
        by_tokens<false, Format>(fours, m, tokens, acc);
    }

    template <bool SUMS, class Format>
    void by_tokens(const Fours& fours, int64_t m, int64_t tokens, Sums acc) const {
        for (int64_t j = 0; j < tokens; j += Vector::TOKENS) {
            const int64_t n = least(Vector::TOKENS, tokens - j);
            if (n == 1) {
                some_tokens<1, SUMS, Format>(fours, m + j, acc.from(j));
            } else if (n == 2) {
                some_tokens<2, SUMS, Format>(fours, m + j, acc.from(j));
            } else if constexpr (Vector::TOKENS > 2) {
                if (n == 3) {
                    some_tokens<3, SUMS, Format>(fours, m + j, acc.from(j));
                } else {
                    some_tokens<4, SUMS, Format>(fours, m + j, acc.from(j));
                }
            }
        }
    }

    template <int N, bool SUMS, class Format>
    __attribute__((noinline)) void some_tokens(const Fours fours, int64_t m, Sums acc) const {
        Format format(prepared);
        for (int64_t c = fours.begin; c < fours.end; ++c) {
            int64_t at[4];  // among the `width` rows; the last one again where there are no more
            const char* w[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                at[r] = least(c + r * fours.apart, fours.width - 1);
                w[r] = dot.w + (fours.first + at[r]) * dot.w_pitch;
                format.enter(r, dot, fours.first + at[r]);
            }
            __m128i out[N], weight_sums = _mm_setzero_si128();
            product_of_four<N, SUMS>(format, w, prepared, m, out, weight_sums);
            if (moved_) {
                if (SUMS) {
                    weight_sums = _mm_sub_epi32(weight_sums, _mm_set1_epi32(int32_t(Format::BIAS * e.k)));
                } else {
                    const int32_t* s = e.weight_sum + fours.first;
                    weight_sums = _mm_setr_epi32(s[at[0]], s[at[1]], s[at[2]], s[at[3]]);
                }
            }
            for (int t = 0; t < N; ++t) {
                const uint32_t bias = Format::BIAS * uint32_t(prepared.sums[m + t]);
                __m128i sum = _mm_sub_epi32(out[t], _mm_set1_epi32(int32_t(bias)));
                if (moved_) {
                    const __m128i zero_point = _mm_set1_epi32(shifted_zero_point(e, dot, m + t));
                    sum = _mm_sub_epi32(sum, _mm_mullo_epi32(weight_sums, zero_point));
                }
                alignas(16) int32_t four[4];
                _mm_store_si128(reinterpret_cast<__m128i*>(four), sum);
                for (int r = 0; r < 4; ++r) acc.of(t)[at[r]] = four[r];
            }
        }
    }
};

}  // namespace
}  // namespace baracuda
