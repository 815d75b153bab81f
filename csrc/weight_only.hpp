// Linears of float activations and integer weights. Included once per instruction set.
//
// The order of a sum is fixed, so that a row's bits depend on nothing but the row: w[k] = T(q[k] - zero point) * scale,
// rounded; lane k mod 32 adds up x[k] * w[k] in the order of k, from zero, each product and each sum rounded; lanes 2i and
// 2i + 1 are added; then the upper half of the lanes to the lower half until one is left. T is f32, or f64 for f64.
#pragma once
#include "few_rows.hpp"

namespace baracuda {
namespace {

constexpr int64_t LANES = 32;
constexpr int64_t FETCHED = 1024;  // bytes of a row that are fetched before they are read

// 32 weights or sums: those of even k, then those of odd k.
template <class M>
struct Block {
    M even[LANES / 2], odd[LANES / 2];

    static Block zero() { return {}; }
    static Block load(const M* from) {
        Block block;
        memcpy(&block, from, sizeof(block));
        return block;
    }
    ALWAYS_INLINE void add_product(const M* x, const Block& w) {
        for (int i = 0; i < LANES / 2; ++i) even[i] = even[i] + x[i] * w.even[i];
        for (int i = 0; i < LANES / 2; ++i) odd[i] = odd[i] + x[LANES / 2 + i] * w.odd[i];
    }
    ALWAYS_INLINE M total() const {
        M lanes[LANES / 2];
        for (int i = 0; i < LANES / 2; ++i) lanes[i] = even[i] + odd[i];
        for (int half = LANES / 4; half; half /= 2)
            for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
        return lanes[0];
    }
};

#if defined(__AVX512F__)
template <>
struct Block<float> {
    __m512 even, odd;

    static Block zero() { return {_mm512_setzero_ps(), _mm512_setzero_ps()}; }
    static Block load(const float* from) { return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + LANES / 2)}; }
    ALWAYS_INLINE void add_product(const float* x, const Block& w) {
        even = _mm512_add_ps(even, _mm512_mul_ps(_mm512_loadu_ps(x), w.even));
        odd = _mm512_add_ps(odd, _mm512_mul_ps(_mm512_loadu_ps(x + LANES / 2), w.odd));
    }
    ALWAYS_INLINE float total() const {
        const __m512 sixteen = _mm512_add_ps(even, odd);
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sixteen), 1));
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sixteen), high);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
};
#endif

// -- weights -----------------------------------------------------------------------------------------------------

// What the weights of a group share.
template <class M, bool PACKED>
struct Group {
    M scale;
    int32_t zero_point;

    void begin(const FloatWeights&) {}
    ALWAYS_INLINE void enter(M s, const int32_t* zero) { scale = s, zero_point = zero ? *zero : 0; }
};

#if defined(__AVX512F__)
template <>
struct Group<float, true> {
    __m512 values, table;  // the sixteen values of four bits, and what they stand for

    void begin(const FloatWeights& f) {
        const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i flip = _mm512_set1_epi32(f.weight == S4 ? 8 : 0);
        values = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_xor_si512(count, flip), flip));
    }
    // Integers below 2**24: the difference is exact in f32, too.
    ALWAYS_INLINE void enter(float scale, const int32_t* zero) {
        const __m512 moved = zero ? _mm512_sub_ps(values, _mm512_set1_ps(float(*zero))) : values;
        table = _mm512_mul_ps(moved, _mm512_set1_ps(scale));
    }
};
#endif

// Of one row. Scales and zero points are one for each group of k; some at a time are converted ahead.
template <class M, bool PACKED>
class Row {
    static constexpr int64_t AHEAD = 64;
    const FloatWeights* f;
    const uint8_t* stored;
    int64_t row, groups, base, filled;
    M scales[AHEAD];
    int32_t zero_points[AHEAD];

public:
    void begin(const FloatWeights& weights, int64_t n, int64_t k) {
        f = &weights, stored = reinterpret_cast<const uint8_t*>(weights.w) + n * weights.w_pitch, row = n;
        groups = (k + weights.group - 1) / weights.group, base = filled = 0;
    }

    ALWAYS_INLINE void enter(int64_t at, Group<M, PACKED>& group) {
        if (at >= filled) fill(at);
        group.enter(scales[at - base], f->zero_point ? zero_points + (at - base) : nullptr);
    }

    ALWAYS_INLINE void fetch(int64_t k) const { __builtin_prefetch(stored + (PACKED ? k / 2 : k) + FETCHED); }

    // The 32 weights from k on, all of one group.
    ALWAYS_INLINE Block<M> whole(int64_t k, const Group<M, PACKED>& g) const {
#if defined(__AVX512F__)
        if constexpr (sizeof(M) == 4 && PACKED) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored + k / 2));
            const __m512i pairs = _mm512_cvtepu8_epi32(bytes);  // a permutation reads the low four bits alone
            return {_mm512_permutexvar_ps(pairs, g.table), _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), g.table)};
        } else if constexpr (sizeof(M) == 4) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stored + k));
            const __m512i pairs = _mm512_cvtepi16_epi32(bytes);
            const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24), odd = _mm512_srai_epi32(pairs, 8);
            const __m512i zero = _mm512_set1_epi32(g.zero_point);
            const __m512 s = _mm512_set1_ps(g.scale);
            return {_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(even, zero)), s),
                    _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(odd, zero)), s)};
        } else
#endif
        {
            M w[LANES];
            spread(k, LANES, w, [&](int64_t, int32_t q) { return M(q - g.zero_point) * g.scale; });
            return Block<M>::load(w);
        }
    }

    // n weights from k on, of any groups; zeros beside them.
    __attribute__((noinline)) Block<M> pieces(int64_t k, int64_t n) {
        M w[LANES] = {};
        spread(k, n, w, [&](int64_t i, int32_t q) {
            const int64_t at = i / f->group;
            if (at < base || at >= filled) fill(at);
            return M(q - (f->zero_point ? zero_points[at - base] : 0)) * scales[at - base];
        });
        return Block<M>::load(w);
    }

private:
    __attribute__((noinline)) void fill(int64_t group) {
        const int64_t n = least(AHEAD, groups - group);
        base = group, filled = group + n;
        widen<M>(f->scale_code, static_cast<const char*>(f->scale), row * f->scale_pitch + group, n, scales);
        if (!f->zero_point) return;
        const int32_t* from = f->zero_point + row * f->zero_point_pitch + group;
        for (int64_t i = 0; i < n; ++i) zero_points[i] = clamped(from[i]);
    }

    // to: even ones first.
    template <class Value>
    ALWAYS_INLINE void spread(int64_t k, int64_t n, M* to, Value value) const {
        uint8_t q[LANES];
        const uint8_t* from = q;
        if (!PACKED) {
            from = stored + k;
        } else {
            unpack(stored + k / 2, n, f->weight == S4, q);
        }
        for (int64_t i = 0; i < n; ++i) to[i % 2 * (LANES / 2) + i / 2] = value(k + i, int32_t(int8_t(from[i])));
    }
};

// -- the product -------------------------------------------------------------------------------------------------

inline int64_t padded(int64_t k) { return (k + LANES - 1) / LANES * LANES; }

// The activations in the math type, arranged as the weights are, padded with zeros.
template <class M>
void prepare_floats_in(const Epilogue& e, const FloatWeights& f) {
    M buffer[LANES];
    for (int64_t m = 0; m < e.m; ++m)
        for (int64_t k = 0; k < e.k; k += LANES) {
            M* to = reinterpret_cast<M*>(f.prepared) + m * padded(e.k) + k;
            const int64_t n = least(LANES, e.k - k);
            widen<M>(e.element, f.x, m * f.x_pitch + k, n, buffer);
            for (int64_t i = n; i < LANES; ++i) buffer[i] = 0;
            for (int64_t i = 0; i < LANES / 2; ++i) to[i] = buffer[2 * i], to[LANES / 2 + i] = buffer[2 * i + 1];
        }
}

template <class M>
struct FloatProduct {
    const Epilogue& e;
    const FloatWeights& f;

    void operator()(int64_t m, int64_t tokens, int64_t first, Sums<M> acc) const {
        if (f.weight == S8) return by_tokens<false>(m, tokens, first, acc);
        by_tokens<true>(m, tokens, first, acc);
    }

private:
    // With few tokens, several rows of weights together: their sums do not wait for each other.
    template <bool PACKED>
    void by_tokens(int64_t m, int64_t tokens, int64_t first, Sums<M> acc) const {
        for (int64_t j = 0; j < tokens;) {
            const int64_t left = tokens - j;
            j += left >= 8   ? by_rows<8, 1, PACKED>(m + j, first, acc.from(j))
                 : left >= 4 ? by_rows<4, 1, PACKED>(m + j, first, acc.from(j))
                 : left >= 2 ? by_rows<2, 2, PACKED>(m + j, first, acc.from(j))
                             : by_rows<1, 4, PACKED>(m + j, first, acc.from(j));
        }
    }

    // The rows of weights lie apart, as in VectorProduct.
    template <int N, int R, bool PACKED>
    __attribute__((noinline)) int64_t by_rows(int64_t m, int64_t first, Sums<M> acc) const {
        const int64_t apart = (acc.width + R - 1) / R;
        Row<M, PACKED> rows[R];
        int64_t columns[R];
        for (int64_t c = 0; c < apart; ++c) {
            for (int r = 0; r < R; ++r) {
                columns[r] = least(c + r * apart, acc.width - 1);
                rows[r].begin(f, first + columns[r], e.k);
            }
            some<N, R>(m, rows, columns, acc);
        }
        return N;
    }

    template <int N, int R, bool PACKED>
    ALWAYS_INLINE void some(int64_t m, Row<M, PACKED>* rows, const int64_t* columns, Sums<M> acc) const {
        const int64_t pitch = padded(e.k), even = f.group % LANES ? 0 : e.k / LANES * LANES;
        const M* x = reinterpret_cast<const M*>(f.prepared) + m * pitch;
        Block<M> sums[R][N];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < N; ++t) sums[r][t] = Block<M>::zero();
        auto add = [&](int r, int64_t k, const Block<M>& w) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int t = 0; t < N; ++t) sums[r][t].add_product(x + t * pitch + k, w);
        };
        Group<M, PACKED> groups[R];
        for (int r = 0; r < R; ++r) groups[r].begin(f);
        int64_t k = 0;
        for (int64_t at = 0; k < even; ++at) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) rows[r].enter(at, groups[r]);
            const int64_t end = least(even, (at + 1) * f.group);
            for (; k < end; k += LANES) {
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) rows[r].fetch(k), add(r, k, rows[r].whole(k, groups[r]));
            }
        }
        for (; k < e.k; k += LANES)
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) add(r, k, rows[r].pieces(k, least(LANES, e.k - k)));
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < N; ++t) acc.of(t)[columns[r]] = sums[r][t].total();
    }
};

void prepare_floats(const Epilogue& e, const FloatWeights& f) {
    if (e.element == F64) return prepare_floats_in<double>(e, f);
    prepare_floats_in<float>(e, f);
}

void multiply_floats(const Epilogue& e, const FloatWeights& f, int64_t part, int64_t parts) {
    const Range r = share(e.n, part, parts);
    if (e.element == F64) return multiply_share<double, double>(e, r, FloatProduct<double>{e, f});
    multiply_share<float, float>(e, r, FloatProduct<float>{e, f});
}

}  // namespace
}  // namespace baracuda
