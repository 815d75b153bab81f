// Columns of a weight, rounded one after the other: what each one's rounding does to the sum that the layer computes is
// handed on to the columns behind it. Included once per instruction set.
#pragma once
#include <cstring>

#include "produce.hpp"

namespace baracuda {
namespace {

// Rows of the weight that are rounded together: no row depends on another one.
constexpr int64_t LANES = 64;
// Sixteen of them; where the instruction set has narrower vectors, the compiler takes several for one.
typedef float Wide __attribute__((vector_size(64)));
constexpr int64_t WIDES = LANES / 16;

// Nearest integers between low and high, ties to even; NaN stays. The sum has no room for a fraction.
#define NEAREST(x, low, high)            \
    x = x < low ? low : x;               \
    x = x > high ? high : x;             \
    x = (x + 12582912.0f) - 12582912.0f;

inline void load(const float* from, int64_t n, float fill, Wide* to) {
    alignas(64) float lanes[LANES];
    for (int64_t i = n; i < LANES; ++i) lanes[i] = fill;
    memcpy(lanes, from, n * sizeof(float));
    memcpy(to, lanes, sizeof lanes);
}

inline void store(const Wide* from, int64_t n, float* to) { memcpy(to, from, n * sizeof(float)); }

// Rows [first, first + n) of all columns. `passed` has room for what each column hands on: count * WIDES.
inline void round_rows(const Columns& c, int64_t first, int64_t n, Wide* passed) {
    const Wide low = Wide{} + c.low, high = Wide{} + c.high;
    Wide x[WIDES], q[WIDES], scale[WIDES];
    for (int64_t i = 0; i < c.count; ++i) {
        const int64_t at = i * c.rows + first;
        load(c.values + at, n, 0.0f, x);
        for (int64_t j = 0; j < i; ++j) {
            const float weight = c.factor[j * c.pitch + i];
            const Wide* error = passed + j * WIDES;
            for (int64_t l = 0; l < WIDES; ++l) x[l] -= weight * error[l];
        }
        load(c.scale + c.groups[i] * c.rows + first, n, 1.0f, scale);
        const float own = c.factor[i * c.pitch + i];
        Wide* error = passed + i * WIDES;
        for (int64_t l = 0; l < WIDES; ++l) {
            Wide best = x[l] / scale[l];
            NEAREST(best, low, high)
            error[l] = (x[l] - best * scale[l]) / own;
            q[l] = best;
        }
        store(q, n, c.integers + at);
        store(error, n, c.passed + at);
    }
}

#undef NEAREST

inline void round_columns(const Columns& c) {
    Buffer<Wide> passed(c.count * WIDES);
    for (int64_t first = 0; first < c.rows; first += LANES) {
        const int64_t n = c.rows - first < LANES ? c.rows - first : LANES;
        round_rows(c, first, n, passed.data());
    }
}

}  // namespace
}  // namespace baracuda
