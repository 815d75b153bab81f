// Norms and gated products, quantized while they are in the cache: a block of rows is made in the element's own type,
// then the kernels that quantize any tensor read it from there. Included once per instruction set.
#pragma once
#include <cstdlib>

#include "activation.hpp"
#include "ranges.hpp"

namespace baracuda {
namespace {

// Elements of the rows that are made before they are quantized.
constexpr int64_t PRODUCED_ELEMENTS = 16384;

// Memory of one call. Not a vector of the library: its functions have one name in every instruction set.
template <class T>
class Buffer {
    T* data_;

public:
    explicit Buffer(int64_t n) : data_(static_cast<T*>(n ? aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64) : nullptr)) {
        if (n && !data_) abort();
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { free(data_); }
    T* data() { return data_; }
};

// A tile rounded to a 16-bit type and back.
template <class M>
inline void round_to(int element, M* y, int64_t n, char* stored) {
    if (element > BF16) return;
    IVDEP for (int64_t i = 0; i < n; ++i) y[i] = canonical(y[i]);
    narrow<M>(element, y, n, stored);
    widen<M>(element, stored, 0, n, y);
}

template <class M>
inline void put_floats(int element, M* y, int64_t n, char* to) {
    IVDEP for (int64_t i = 0; i < n; ++i) y[i] = canonical(y[i]);
    narrow<M>(element, y, n, to);
}

// The sum of a row of n values: the blocks, lanes and steps of job.hpp, but of lanes, and of blocks, neighbours are added
// until one is left. add(first, n, lanes) adds values to lanes.
template <class Add>
inline double row_sum(int64_t n, const Add& add) {
    constexpr int64_t BLOCK = SUM_LANES * SUM_STEPS;
    alignas(64) double lanes[SUM_LANES];
    auto neighbours = [&](double* sums, int64_t used) {
        for (; used > 1; used = (used + 1) / 2) {
            const int64_t pairs = used / 2;
            IVDEP for (int64_t i = 0; i < pairs; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];  // reads lie ahead
            if (used % 2) sums[pairs] = sums[used - 1];
        }
        return sums[0];
    };
    auto block = [&](int64_t first) {
        const int64_t end = least(n, first + BLOCK), used = least(SUM_LANES, end - first);
        for (int64_t i = 0; i < used; ++i) lanes[i] = 0;
        for (int64_t e = first; e < end; e += SUM_LANES) add(e, least(SUM_LANES, end - e), lanes);
        return neighbours(lanes, used);
    };
    if (n <= BLOCK) return 0.0 + block(0);
    const int64_t blocks = (n + BLOCK - 1) / BLOCK, used = least(SUM_LANES, blocks);
    alignas(64) double totals[SUM_LANES];
    for (int64_t i = 0; i < used; ++i) totals[i] = 0;
    for (int64_t b = 0; b < blocks; ++b) totals[b % SUM_LANES] += block(b * BLOCK);
    return neighbours(totals, used);
}

template <class M>
struct Norm {
    const Production& p;
    Buffer<M> weight, bias, row;
    alignas(64) char stored[TILE_BYTES];

    explicit Norm(const Production& p) : p(p), weight(p.weight ? p.d : 0), bias(p.bias ? p.d : 0), row(p.d) {
        if (p.weight) widen<M>(p.weight_code, static_cast<const char*>(p.weight), 0, p.d, weight.data());
        if (p.bias) widen<M>(p.bias_code, static_cast<const char*>(p.bias), 0, p.d, bias.data());
        for (int64_t i = 0; p.weight && p.style == GEMMA && i < p.d; ++i) weight.data()[i] = M(1) + weight.data()[i];
    }

    void load(int64_t r) {
        M* h = row.data();
        widen<M>(p.element, p.x.data, r * p.x.pitch, p.d, h);
        if (!p.sum_out) return;
        const int64_t bytes = bytes_of(p.element);
        alignas(64) M other[TILE<M>];
        for (int64_t e = 0; e < p.d; e += TILE<M>) {
            const int64_t n = least(TILE<M>, p.d - e);
            char* to = p.sum_out + (r * p.d + e) * bytes;
            widen<M>(p.element, p.other.data, r * p.other.pitch + e, n, other);
            IVDEP for (int64_t i = 0; i < n; ++i) h[e + i] += other[i];
            put_floats<M>(p.element, h + e, n, to);
            widen<M>(p.element, to, 0, n, h + e);
        }
    }

    void operator()(int64_t r, char* out) {
        load(r);
        const M* h = row.data();
        const double size = double(p.d);
        double mean = 0;
        if (p.style == LAYER) {
            mean = row_sum(p.d, [&](int64_t e, int64_t n, double* lanes) {
                IVDEP for (int64_t i = 0; i < n; ++i) lanes[i] += double(h[e + i]);
            }) / size;
        }
        const double squares = p.style == LAYER ? row_sum(p.d, [&](int64_t e, int64_t n, double* lanes) {
            IVDEP for (int64_t i = 0; i < n; ++i) {
                const double x = double(h[e + i]) - mean;
                lanes[i] += x * x;
            }
        }) : row_sum(p.d, [&](int64_t e, int64_t n, double* lanes) {
            IVDEP for (int64_t i = 0; i < n; ++i) lanes[i] += double(h[e + i]) * double(h[e + i]);
        });
        const M inverse = M(1.0 / __builtin_sqrt(squares / size + p.eps));
        alignas(64) M y[TILE<M>];
        for (int64_t e = 0; e < p.d; e += TILE<M>) {
            const int64_t n = least(TILE<M>, p.d - e);
            if (p.style == LAYER) {
                IVDEP for (int64_t i = 0; i < n; ++i) y[i] = M(double(h[e + i]) - mean) * inverse;
            } else {
                IVDEP for (int64_t i = 0; i < n; ++i) y[i] = h[e + i] * inverse;
            }
            if (p.style == LLAMA) round_to<M>(p.element, y, n, stored);
            if (p.weight) {
                const M* w = weight.data() + e;
                IVDEP for (int64_t i = 0; i < n; ++i) y[i] = y[i] * w[i];
            }
            if (p.bias) {
                const M* b = bias.data() + e;
                IVDEP for (int64_t i = 0; i < n; ++i) y[i] = y[i] + b[i];
            }
            put_floats<M>(p.element, y, n, out + e * bytes_of(p.element));
        }
    }
};

template <class M>
struct Gated {
    const Production& p;
    alignas(64) char stored[TILE_BYTES];

    explicit Gated(const Production& p) : p(p) {}

    void operator()(int64_t r, char* out) {
        alignas(64) M y[TILE<M>];
        alignas(64) M up[TILE<M>];
        for (int64_t e = 0; e < p.d; e += TILE<M>) {
            const int64_t n = least(TILE<M>, p.d - e);
            widen<M>(p.element, p.x.data, r * p.x.pitch + e, n, y);
            widen<M>(p.element, p.other.data, r * p.other.pitch + e, n, up);
            activate<M>(p.activation, y, n);
            round_to<M>(p.element, y, n, stored);
            IVDEP for (int64_t i = 0; i < n; ++i) y[i] = y[i] * up[i];
            put_floats<M>(p.element, y, n, out + e * bytes_of(p.element));
        }
    }
};

// The quantization of rows [first, first + n), which lie in the buffer.
inline Job quantization_of(const Production& p, int64_t first, int64_t n, char* buffer) {
    Job job = p.quantization;
    const bool dynamic = job.p.op == DYNAMIC_QUANTIZE;
    job.p.view = dynamic ? View{1, n, p.d, 1} : View{1, 1, n * p.d, 1};
    job.x.data = buffer, job.x.dense = true;
    job.out.data += first * (is_packed(job.p.quantized) ? packed(p.d) : p.d);
    job.stream = false;
    if (!dynamic) return job;
    job.scale_out = static_cast<char*>(job.scale_out) + first * bytes_of(job.p.scale_element);
    if (job.zero_point_out) job.zero_point_out += first;
    return job;
}

template <class M, class X, template <class> class Made>
void produce_rows(const Production& p, Range r) {
    Made<M> made(p);
    const int64_t bytes = bytes_of(p.element) * p.d;
    if (!p.quantizes) {
        for (int64_t row = r.first; row < r.last; ++row) made(row, p.out + row * bytes);
        return;
    }
    const int64_t together = PRODUCED_ELEMENTS / p.d > 1 ? PRODUCED_ELEMENTS / p.d : 1;
    Buffer<char> buffer(least(together, r.last - r.first) * bytes);
    char* floats = buffer.data();
    for (int64_t first = r.first; first < r.last; first += together) {
        const int64_t n = least(together, r.last - first);
        for (int64_t i = 0; i < n; ++i) made(first + i, floats + i * bytes);
        const Job job = quantization_of(p, first, n, floats);
        if (job.p.op == DYNAMIC_QUANTIZE) {
            fused<M, X>(job, 0, 1);
        } else {
            walk<M, X>(job, 0, 1, false);
        }
    }
}

void produce(const Production& p, int64_t part, int64_t parts) {
    const Range r = share(p.rows, part, parts);
    if (p.d == 0) {  // of an empty row there is a scale, and nothing else
        if (!p.quantizes || p.quantization.p.op != DYNAMIC_QUANTIZE || r.first == r.last) return;
        const Job job = quantization_of(p, r.first, r.last - r.first, nullptr);
        if (p.element == F64) return finish_segments<double>(job, 0, r.last - r.first, shared_keys(job));
        return finish_segments<float>(job, 0, r.last - r.first, shared_keys(job));
    }
    by_element(p.element, [&](auto m, auto x) {
        using M = decltype(m);
        using X = decltype(x);
        if (p.gated) return produce_rows<M, X, Gated>(p, r);
        produce_rows<M, X, Norm>(p, r);
    });
}

}  // namespace
}  // namespace baracuda
