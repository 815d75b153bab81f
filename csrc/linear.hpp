// Around the integer multiplication of a linear: weight sums, 4-bit weights, the epilogue. Included once per instruction
// set.
#pragma once
#include "activation.hpp"
#include "walk.hpp"

namespace baracuda {
namespace {

constexpr int64_t CHUNK = 2048;  // products of two 8-bit numbers, summed in 32 bits without overflow

// K up to which (a - zero point) * w cannot leave 32 bits, whatever the data.
constexpr int64_t NARROW_K = 65536;

inline int32_t sum_of(const int8_t* w, int64_t k) {
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += w[i];
    return sum;
}

// n weights of a row from the even index `first` on, as s8: where they lie, or expanded in the buffer.
inline const int8_t* weights(const Dot& dot, int64_t row, int64_t first, int64_t n, int8_t* buffer) {
    if (!dot.w_packed) return reinterpret_cast<const int8_t*>(dot.w) + row * dot.w_pitch + first;
    unpack(reinterpret_cast<const uint8_t*>(dot.w) + row * dot.w_pitch + first / 2, n, true,
           reinterpret_cast<uint8_t*>(buffer));
    if (!dot.factor) return buffer;
    const uint8_t* factors = dot.factor + row * dot.factor_pitch;
    for (int64_t i = 0, size; i < n; i += size) {
        const int64_t group = (first + i) / dot.group;
        size = least(n - i, (group + 1) * dot.group - first - i);
        const int8_t factor = int8_t(factors[group] & 15);
        IVDEP for (int64_t j = i; j < i + size; ++j) buffer[j] = int8_t(buffer[j] * factor);
    }
    return buffer;
}

void weight_sums(const Dot& dot, int64_t n, int64_t k, int32_t* sums, int64_t part, int64_t parts) {
    alignas(64) int8_t buffer[CHUNK];
    const Range r = share(n, part, parts);
    for (int64_t row = r.first; row < r.last; ++row) {
        int32_t sum = 0;
        for (int64_t i = 0; i < k; i += CHUNK) {
            const int64_t size = least(CHUNK, k - i);
            sum += sum_of(weights(dot, row, i, size, buffer), size);
        }
        sums[row] = sum;
    }
}

void unpack_rows(const Dot& dot, int64_t n, int64_t k, int8_t* out, int64_t part, int64_t parts) {
    const Range r = share(n, part, parts);
    for (int64_t row = r.first; row < r.last; ++row) weights(dot, row, 0, k, out + row * k);
}

// u8 activations moved by -128 into s8.
void shift_rows(const Dot& dot, int64_t m, int64_t k, int8_t* out, int64_t part, int64_t parts) {
    const Range r = share(m, part, parts);
    for (int64_t row = r.first; row < r.last; ++row) {
        const uint8_t* from = reinterpret_cast<const uint8_t*>(dot.a) + row * dot.a_pitch;
        int8_t* to = out + row * k;
        IVDEP for (int64_t i = 0; i < k; ++i) to[i] = int8_t(from[i] ^ 0x80);
    }
}

// -- the epilogue ------------------------------------------------------------------------------------------------

template <class M>
inline M row_scale(const Epilogue& e, int64_t m) {
    return e.scale_a ? widened<M>(e.scale_a_code, e.scale_a, m) : M(e.scale_a_number);
}

// What the weight sum is multiplied with and subtracted from the sum: the zero point, as the shifted data sees it.
inline int32_t row_zero_point(const Epilogue& e, int64_t m) {
    return (e.zero_point ? e.zero_point[m] : e.zero_point_number) - e.shift;
}

template <class M>
struct Columns {
    alignas(64) M scale[TILE<M>];
    alignas(64) M bias[TILE<M>];
    alignas(64) M residual[TILE<M>];
    alignas(64) M y[TILE<M>];

    void read(const Epilogue& e, int64_t first, int64_t n) {
        if (e.scale_w) {
            widen<M>(e.scale_w_code, static_cast<const char*>(e.scale_w), first, n, scale);
        } else {
            for (int64_t i = 0; i < n; ++i) scale[i] = M(e.scale_w_number);
        }
        if (e.bias) widen<M>(e.bias_code, static_cast<const char*>(e.bias), first, n, bias);
    }
};

// acc holds n sums of row m, beginning with column `first`.
template <class M, class I>
inline void finish_row(const Epilogue& e, int64_t m, int64_t first, int64_t n, const I* acc, Columns<M>& columns) {
    const M scale = row_scale<M>(e, m);
    M* y = columns.y;
    IVDEP for (int64_t i = 0; i < n; ++i) y[i] = (M(acc[i]) * scale) * columns.scale[i];
    if (e.bias) {
        IVDEP for (int64_t i = 0; i < n; ++i) y[i] = y[i] + columns.bias[i];
    }
    activate(e.activation, y, n);
    if (e.residual) {
        widen<M>(e.element, e.residual, m * e.residual_pitch + first, n, columns.residual);
        IVDEP for (int64_t i = 0; i < n; ++i) y[i] = y[i] + columns.residual[i];
    }
    IVDEP for (int64_t i = 0; i < n; ++i) y[i] = canonical(y[i]);
    narrow<M>(e.element, y, n, e.out + (m * e.n + first) * bytes_of(e.element));
}

template <class M>
void epilogue_rows(const Epilogue& e, const int32_t* acc, int64_t part, int64_t parts) {
    Columns<M> columns;
    alignas(64) int32_t moved[TILE<M>];
    const Range r = share(e.m, part, parts);
    for (int64_t first = 0; first < e.n; first += TILE<M>) {
        const int64_t n = least(TILE<M>, e.n - first);
        columns.read(e, first, n);
        for (int64_t m = r.first; m < r.last; ++m) {
            const int32_t* sums = acc + m * e.n + first;
            const uint32_t zero_point = uint32_t(row_zero_point(e, m));
            if (zero_point) {  // unsigned: the result fits 32 bits, what leads to it may wrap around
                IVDEP for (int64_t i = 0; i < n; ++i)
                    moved[i] = int32_t(uint32_t(sums[i]) - zero_point * uint32_t(e.weight_sum[first + i]));
                sums = moved;
            }
            finish_row<M>(e, m, first, n, sums, columns);
        }
    }
}

void epilogue(const Epilogue& e, const int32_t* acc, int64_t part, int64_t parts) {
    if (e.element == F64) return epilogue_rows<double>(e, acc, part, parts);
    epilogue_rows<float>(e, acc, part, parts);
}

}  // namespace
}  // namespace baracuda
