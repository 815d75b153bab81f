// The integer product of a linear with the epilogue behind it, for few rows (every weight is read once, so memory sets
// the pace) or where a matrix library could overflow (a very long K). Included once per instruction set.
#pragma once
#include "linear.hpp"
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include "vnni.hpp"
#endif

namespace baracuda {
namespace {

// The sums that one thread holds: those of TOKENS rows of activations at most, and of more columns the fewer there are.
constexpr int64_t TOKENS = 16, HELD = 1024;

template <class I>
struct Sums {
    I* first;
    int64_t width;  // columns
    I* of(int64_t token) const { return first + token * width; }
    Sums from(int64_t token) const { return {of(token), width}; }
};

// -- without instructions for it ---------------------------------------------------------------------------------

// The zero point goes into the activations, which are 16-bit here: no sum needs a correction.
inline void centre(const Epilogue& e, const Dot& dot) {
    int16_t* to = reinterpret_cast<int16_t*>(dot.prepared);
    for (int64_t m = 0; m < e.m; ++m, to += e.k) {
        const int16_t zero_point = int16_t(row_zero_point(e, m));
        const char* from = dot.a + m * dot.a_pitch;
        if (dot.a_unsigned) {
            IVDEP for (int64_t i = 0; i < e.k; ++i) to[i] = int16_t(uint8_t(from[i]) - zero_point);
        } else {
            IVDEP for (int64_t i = 0; i < e.k; ++i) to[i] = int16_t(int8_t(from[i]) - zero_point);
        }
    }
}

inline int32_t inner_product(const int16_t* a, const int8_t* w, int64_t n) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += a[i] * int16_t(w[i]);
    return sum;
}

// The sum over a chunk fits 32 bits, that over all of K fits I.
template <class I>
struct PlainProduct {
    const Epilogue& e;
    const Dot& dot;

    void operator()(int64_t m, int64_t tokens, int64_t first, Sums<I> acc) const {
        alignas(64) int8_t buffer[CHUNK];
        const int16_t* a = reinterpret_cast<const int16_t*>(dot.prepared) + m * e.k;
        for (int64_t j = 0; j < tokens; ++j)
            for (int64_t c = 0; c < acc.width; ++c) acc.of(j)[c] = 0;
        for (int64_t i = 0; i < e.k; i += CHUNK) {
            const int64_t n = least(CHUNK, e.k - i);
            for (int64_t c = 0; c < acc.width; ++c) {
                const int8_t* w = weights(dot, first + c, i, n, buffer);
                for (int64_t j = 0; j < tokens; ++j) acc.of(j)[c] += inner_product(a + j * e.k + i, w, n);
            }
        }
    }
};

// -- one thread's share ------------------------------------------------------------------------------------------

template <class M, class I, class Product>
inline void multiply_share(const Epilogue& e, Range r, const Product& product) {
    Columns<M> columns;
    alignas(64) I held[HELD];
    const int64_t most = least(TOKENS, e.m), widest = least(HELD / most, TILE<M>);
    for (int64_t first = r.first; first < r.last; first += widest) {
        const Sums<I> acc{held, least(widest, r.last - first)};
        columns.read(e, first, acc.width);
        for (int64_t m = 0; m < e.m; m += most) {
            const int64_t tokens = least(most, e.m - m);
            product(m, tokens, first, acc);
            for (int64_t j = 0; j < tokens; ++j) finish_row<M>(e, m + j, first, acc.width, acc.of(j), columns);
        }
    }
}

inline bool uses_vectors(const Epilogue& e, const Dot& dot) {
#if defined(BARACUDA_VNNI)
    return e.k > 0 && e.k <= NARROW_K && (!dot.factor || dot.group % LANE_WEIGHTS == 0);
#else
    return (void)e, (void)dot, false;
#endif
}

template <class M>
void multiply_in(const Epilogue& e, const Dot& dot, Range r) {
#if defined(BARACUDA_VNNI)
    if (uses_vectors(e, dot)) return multiply_share<M, int32_t>(e, r, VectorProduct<Sums<int32_t>>(e, dot));
#endif
    if (e.k <= NARROW_K) return multiply_share<M, int32_t>(e, r, PlainProduct<int32_t>{e, dot});
    multiply_share<M, int64_t>(e, r, PlainProduct<int64_t>{e, dot});
}

// The activations, once for all threads.
void prepare(const Epilogue& e, const Dot& dot) {
#if defined(BARACUDA_VNNI)
    if (uses_vectors(e, dot)) return Prepared(e, dot).fill(e, dot);
#endif
    centre(e, dot);
}

void multiply(const Epilogue& e, const Dot& dot, int64_t part, int64_t parts) {
    const Range r = share(e.n, part, parts);
    if (e.element == F64) return multiply_in<double>(e, dot, r);
    multiply_in<float>(e, dot, r);
}

}  // namespace
}  // namespace baracuda
