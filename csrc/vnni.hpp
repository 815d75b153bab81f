// The integer product with vpdpbusd, which adds four products of an unsigned and a signed byte to a 32-bit sum.
//
// The weights are the unsigned side: w + 128. What that adds is 128 times the sum of the activations, which is known
// before a weight is read. All sums are modulo 2**32; the result fits 32 bits, so it is exact.
#pragma once
#include <immintrin.h>

#include "linear.hpp"

#define BARACUDA_VNNI

namespace baracuda {
namespace {

constexpr int64_t AHEAD = 1024;       // bytes of a row that are fetched before they are read
constexpr int64_t LANE_WEIGHTS = 32;  // the 4-bit weights of 16 bytes, which share a table

// table[f][nibble] = f * s4(nibble) + 128
struct Tables {
    alignas(64) uint8_t of[16][16];
    constexpr Tables() : of() {
        for (int f = 0; f < 16; ++f)
            for (int nibble = 0; nibble < 16; ++nibble) of[f][nibble] = uint8_t(f * ((nibble ^ 8) - 8) + 128);
    }
};
constexpr Tables TABLES;

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
    static V low(V x) { return _mm512_and_si512(x, all(15)); }
    static V high(V x) { return low(_mm512_srli_epi16(x, 4)); }
    static V look_up(V table, V at) { return _mm512_shuffle_epi8(table, at); }
    static __m128i row(int factor) { return _mm_load_si128(reinterpret_cast<const __m128i*>(TABLES.of[factor & 15])); }
    static V table(int factor) { return _mm512_broadcast_i32x4(row(factor)); }
    static V table(int first, int second) { return _mm512_mask_broadcast_i32x4(table(first), 0xff00, row(second)); }
    static V table(const uint8_t* factors, const int32_t* groups) {
        V t = table(factors[groups[0]]);
        t = _mm512_mask_broadcast_i32x4(t, 0x00f0, row(factors[groups[1]]));
        t = _mm512_mask_broadcast_i32x4(t, 0x0f00, row(factors[groups[2]]));
        return _mm512_mask_broadcast_i32x4(t, 0xf000, row(factors[groups[3]]));
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
    static V low(V x) { return _mm256_and_si256(x, all(15)); }
    static V high(V x) { return low(_mm256_srli_epi16(x, 4)); }
    static V look_up(V table, V at) { return _mm256_shuffle_epi8(table, at); }
    static __m128i row(int factor) { return _mm_load_si128(reinterpret_cast<const __m128i*>(TABLES.of[factor & 15])); }
    static V table(int factor) { return _mm256_broadcastsi128_si256(row(factor)); }
    static V table(int first, int second) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(row(first)), row(second), 1);
    }
    static V table(const uint8_t* factors, const int32_t* groups) { return table(factors[groups[0]], factors[groups[1]]); }
    static __m128i sum(V a, V b, V c, V d) {
        const V four = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        return _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    }
};
#endif
using V = Vector::V;

// Signed activations, rows padded with zeros to whole vectors; beside packed weights, the even ones of a vector come
// first, then the odd ones. A row of ones, which sums up weights. Before them the sums of the activations, and the group of
// each lane of 4-bit weights.
struct Prepared {
    int32_t *sums, *groups;
    int8_t *ones, *a;
    int64_t bytes, pitch;  // of a row of weights, and of activations

    Prepared(const Epilogue& e, const Dot& dot) {
        constexpr int64_t BYTES = Vector::BYTES;
        bytes = dot.w_packed ? packed(e.k) : e.k;
        pitch = (bytes + BYTES - 1) / BYTES * BYTES * (dot.w_packed ? 2 : 1);
        sums = reinterpret_cast<int32_t*>(dot.prepared);
        groups = sums + (e.m + 15) / 16 * 16;
        ones = reinterpret_cast<int8_t*>(groups + (e.k + 127) / 128 * 4);
        a = ones + pitch;
    }

    void fill(const Epilogue& e, const Dot& dot) const {
        const uint8_t flip = dot.a_unsigned ? 0x80 : 0;
        arrange(ones, e.k, dot.w_packed, [](int64_t) { return int8_t(1); });
        for (int64_t m = 0; m < e.m; ++m) {
            const uint8_t* from = reinterpret_cast<const uint8_t*>(dot.a) + m * dot.a_pitch;
            int32_t sum = 0;
            for (int64_t i = 0; i < e.k; ++i) sum += int8_t(from[i] ^ flip);
            sums[m] = sum;
            arrange(a + m * pitch, e.k, dot.w_packed, [=](int64_t i) { return int8_t(from[i] ^ flip); });
        }
        if (!dot.factor) return;
        const int64_t lanes = pitch / LANE_WEIGHTS;
        for (int64_t i = 0; i < lanes; ++i) groups[i] = int32_t(least(i * LANE_WEIGHTS, e.k - 1) / dot.group);
    }

private:
    template <class Value>
    void arrange(int8_t* to, int64_t k, bool pairs, Value value) const {
        constexpr int64_t BYTES = Vector::BYTES;
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

// How a vector of stored bytes becomes PARTS vectors of w + 128; `at` counts vectors from the start of row r of four.
struct Bytes {
    static constexpr int PARTS = 1;
    void read(int, int64_t, V stored, V* parts) const { parts[0] = Vector::flip(stored); }
};

struct Nibbles {
    static constexpr int PARTS = 2;
    V table = Vector::table(1);
    void read(int, int64_t, V stored, V* parts) const { spread(table, stored, parts); }
    static void spread(V table, V stored, V* parts) {
        parts[0] = Vector::look_up(table, Vector::low(stored));
        parts[1] = Vector::look_up(table, Vector::high(stored));
    }
};

struct GroupsInVector : Nibbles {
    const uint8_t* factors[4];
    const int32_t* groups;
    void read(int r, int64_t at, V stored, V* parts) const {
        spread(Vector::table(factors[r], groups + at * (Vector::BYTES / 16)), stored, parts);
    }
};

// Where a group has whole halves of a vector.
struct HalvesInGroup : GroupsInVector {
    void read(int r, int64_t at, V stored, V* parts) const {
        const int32_t* lanes = groups + at * (Vector::BYTES / 16);
        spread(Vector::table(factors[r][lanes[0]], factors[r][lanes[Vector::BYTES / 32]]), stored, parts);
    }
};

// Where a group has whole vectors.
struct VectorsInGroup : GroupsInVector {
    void read(int r, int64_t at, V stored, V* parts) const {
        spread(Vector::table(factors[r][groups[at * (Vector::BYTES / 16)]]), stored, parts);
    }
};

// The sums of four rows of weights with N rows of activations; with the sums of the weights themselves where asked for.
template <int N, bool SUMS, class Format>
ALWAYS_INLINE void product_of_four(const Format& format, const char* const w[4], const Prepared& prepared, int64_t m,
                                   __m128i out[N], __m128i& weight_sums) {
    constexpr int64_t BYTES = Vector::BYTES, PARTS = Format::PARTS;
    const int64_t bytes = prepared.bytes, pitch = prepared.pitch;
    const int8_t *a = prepared.a + m * pitch, *ones = prepared.ones;
    V acc[N][4], sums[4];
    for (int r = 0; r < 4; ++r) sums[r] = Vector::zero();
    for (int t = 0; t < N; ++t)
        for (int r = 0; r < 4; ++r) acc[t][r] = Vector::zero();
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

// Rows of weights that are multiplied together.
struct FourRows {
    const char* w[4];
    int64_t at[4];  // their places among all rows
};

template <class Sums>
class VectorProduct {
    const Epilogue& e;
    const Dot& dot;
    const Prepared prepared;
    bool moved_ = false;  // whether any row has a zero point to be taken out

public:
    VectorProduct(const Epilogue& epilogue, const Dot& operands) : e(epilogue), dot(operands), prepared(epilogue, operands) {
        for (int64_t m = 0; m < e.m; ++m) moved_ |= zero_point(m) != 0;
    }

    void operator()(int64_t m, int64_t tokens, int64_t first, Sums acc) const {
        // A processor fetches ahead only so far in one place, but in several places at once: four rows that lie apart.
        const int64_t last = first + acc.width - 1, apart = (acc.width + 3) / 4;
        for (int64_t c = 0; c < apart; ++c) {
            FourRows rows;
            for (int64_t r = 0; r < 4; ++r) {
                rows.at[r] = least(first + c + r * apart, last);
                rows.w[r] = dot.w + rows.at[r] * dot.w_pitch;
            }
            if (!dot.w_packed) {
                by_sums(Bytes{}, rows, m, tokens, first, acc);
            } else if (!dot.factor) {
                by_sums(Nibbles{}, rows, m, tokens, first, acc);
            } else {
                in_groups(rows, m, tokens, first, acc);
            }
        }
    }

private:
    // As the shifted activations see it.
    int32_t zero_point(int64_t m) const { return row_zero_point(e, m) - (dot.a_unsigned ? 128 : 0); }

    void in_groups(const FourRows& rows, int64_t m, int64_t tokens, int64_t first, Sums acc) const {
        GroupsInVector format;
        for (int64_t r = 0; r < 4; ++r) format.factors[r] = dot.factor + rows.at[r] * dot.factor_pitch;
        format.groups = prepared.groups;
        if (dot.group % (2 * Vector::BYTES) == 0) {
            by_sums(VectorsInGroup{format}, rows, m, tokens, first, acc);
        } else if (dot.group % Vector::BYTES == 0) {
            by_sums(HalvesInGroup{format}, rows, m, tokens, first, acc);
        } else {
            by_sums(format, rows, m, tokens, first, acc);
        }
    }

    template <class Format>
    ALWAYS_INLINE void by_sums(const Format& format, const FourRows& rows, int64_t m, int64_t tokens, int64_t first,
                               Sums acc) const {
        if (moved_ && !e.weight_sum) return by_tokens<true>(format, rows, m, tokens, first, acc);
        by_tokens<false>(format, rows, m, tokens, first, acc);
    }

    template <bool SUMS, class Format>
    ALWAYS_INLINE void by_tokens(const Format& format, const FourRows& rows, int64_t m, int64_t tokens, int64_t first,
                                 Sums acc) const {
        for (int64_t j = 0; j < tokens; j += Vector::TOKENS) {
            const int64_t n = least(Vector::TOKENS, tokens - j);
            if (n == 1) {
                some_tokens<1, SUMS>(format, rows, m + j, first, acc.from(j));
            } else if (n == 2) {
                some_tokens<2, SUMS>(format, rows, m + j, first, acc.from(j));
            } else if constexpr (Vector::TOKENS > 2) {
                if (n == 3) {
                    some_tokens<3, SUMS>(format, rows, m + j, first, acc.from(j));
                } else {
                    some_tokens<4, SUMS>(format, rows, m + j, first, acc.from(j));
                }
            }
        }
    }

    template <int N, bool SUMS, class Format>
    __attribute__((noinline)) void some_tokens(const Format& format, const FourRows& rows, int64_t m, int64_t first,
                                               Sums acc) const {
        __m128i out[N], weight_sums = _mm_setzero_si128();
        product_of_four<N, SUMS>(format, rows.w, prepared, m, out, weight_sums);
        if (moved_) {
            if (SUMS) {
                weight_sums = _mm_sub_epi32(weight_sums, _mm_set1_epi32(int32_t(128 * e.k)));
            } else {
                const int32_t* s = e.weight_sum;
                weight_sums = _mm_setr_epi32(s[rows.at[0]], s[rows.at[1]], s[rows.at[2]], s[rows.at[3]]);
            }
        }
        for (int t = 0; t < N; ++t) {
            __m128i sum = _mm_sub_epi32(out[t], _mm_set1_epi32(int32_t(uint32_t(prepared.sums[m + t]) << 7)));
            if (moved_) sum = _mm_sub_epi32(sum, _mm_mullo_epi32(weight_sums, _mm_set1_epi32(zero_point(m + t))));
            alignas(16) int32_t four[4];
            _mm_store_si128(reinterpret_cast<__m128i*>(four), sum);
            for (int r = 0; r < 4; ++r) acc.of(t)[rows.at[r] - first] = four[r];
        }
    }
};

}  // namespace
}  // namespace baracuda
