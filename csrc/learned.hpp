// The backward of a learned fake-quantization: dx and, from the same pass, the sums for scale and zero point. Included
// once per instruction set.
//
// Every sum is taken in the order that job.hpp lays down, whatever the threads and vectors: a block's lanes are held
// side by side, so that a step over them is one loop, and so is each halving.
#pragma once
#include "walk.hpp"

namespace baracuda {
namespace {

// The lanes of some neighbouring segments as [lanes][width], for the scale and of the dy that were clamped away.
struct Lanes {
    static constexpr int64_t SIZE = 4096;
    alignas(64) double scale[SIZE];
    alignas(64) double lost[SIZE];

    void reset(int64_t n) {
        for (int64_t i = 0; i < n; ++i) scale[i] = 0;
        for (int64_t i = 0; i < n; ++i) lost[i] = 0;
    }

    // The upper half of the lanes is added to the lower half until one is left.
    void halve(int64_t lanes, int64_t width) {
        halve(scale, lanes, width);
        halve(lost, lanes, width);
    }

    // Lanes up to the next power of two would hold zeros, and nothing is added for them.
    static void halve(double* sums, int64_t lanes, int64_t width) {
        for (int64_t half = power_of_two(lanes) / 2; half > 0; lanes = half, half /= 2) {
            const int64_t n = (lanes - half) * width;
            IVDEP for (int64_t i = 0; i < n; ++i) sums[i] += sums[i + half * width];
        }
    }
};

template <int D, class M, class X, class P>
__attribute__((noinline)) void learn(const Problem& problem, const Span<X>& span, const P& parameters, double* scale_sum,
                                     double* lost_sum) {
    const P p = parameters;  // a local that no store can seem to change
    const int q_min = problem.q_min, q_max = problem.q_max;
    const X *x = span.x, *dy = span.dy;
    X* y = span.y;
    const int64_t n = span.n;
    IVDEP for (int64_t i = 0; i < n; ++i) {
        const M low = M(q_min - p.zero_point(i)), high = M(q_max - p.zero_point(i));
        const M g = dy[i], ratio = divide<D, M>(x[i], p.scale(i), p.inverse(i)), t = rounded(ratio);
        const bool inside = (low <= t) & (t <= high);
        const M bound = t > high ? high : low, slope = inside ? t - ratio : bound;
        const double product = double(g) * double(slope);
        scale_sum[i] += slope == 0 ? 0.0 : product;
        lost_sum[i] += double(inside ? M(0) : g);
        y[i] = canonical(inside ? g : M(0));
    }
}

template <class M, class X, class P>
inline void learn_by_rule(const Job& job, const Span<X>& span, const P& parameters, double* scale_sum, double* lost_sum) {
    if (job.p.reciprocal) return learn<RECIPROCAL, M>(job.p, span, parameters, scale_sum, lost_sum);
    learn<DIVIDE, M>(job.p, span, parameters, scale_sum, lost_sum);
}

// The gradients of segments [first, first + n) from their sums.
template <class M>
inline void put_gradients(const Job& job, int64_t first, int64_t n, const double* scale_sum, const double* lost_sum) {
    M *grad_scale = static_cast<M*>(job.grad_scale) + first, *grad_zero_point = static_cast<M*>(job.grad_zero_point) + first;
    for (int64_t i = 0; i < n; ++i) {
        const double lost = lost_sum[i], scale = double(scale_of<M>(job, first + i));
        grad_scale[i] = canonical(M(scale_sum[i]));
        grad_zero_point[i] = canonical(M(lost == 0 ? 0.0 : -scale * lost));
    }
}

// The same where a block is all of a segment; else its sums are kept.
template <class M>
inline void put_block(const Job& job, int64_t units, int64_t unit, int64_t first, int64_t n, const double* scale_sum,
                      const double* lost_sum) {
    if (units == 1) return put_gradients<M>(job, first, n, scale_sum, lost_sum);
    double* to = job.sums + unit * job.p.view.segments() + first;
    memcpy(to, scale_sum, n * sizeof(double));
    memcpy(to + units * job.p.view.segments(), lost_sum, n * sizeof(double));
}

// One block of a dense run.
template <class M, class X>
inline void learn_run(const Job& job, int64_t line, int64_t block, Tile<M, X>& tile, Lanes& lanes) {
    const View& v = job.p.view;
    const int64_t start = block * SUM_LANES * SUM_STEPS, end = least(v.run, start + SUM_LANES * SUM_STEPS);
    const int64_t used = least(SUM_LANES, end - start), blocks = sum_blocks(v);
    const One<M> one = parameters<M>(job, line % v.rows);
    lanes.reset(used);
    for (int64_t e = start; e < end; e += TILE<M>) {
        const int64_t lane = (e - start) % SUM_LANES;
        process(job, line * v.run + e, least(TILE<M>, end - e), tile, [&](const Span<X>& span) {
            learn_by_rule<M>(job, span, one, lanes.scale + lane, lanes.lost + lane);
        });
    }
    lanes.halve(used, 1);
    put_block<M>(job, v.repeat * blocks, line / v.rows * blocks + block, line % v.rows, 1, lanes.scale, lanes.lost);
}

// Dense runs too short for a loop each, and so of one block: [first, last), as many at a time as fit a tile.
template <class M, class X>
inline void learn_short_runs(const Job& job, int64_t first, int64_t last, Tile<M, X>& tile, Lanes& lanes) {
    const View& v = job.p.view;
    const int64_t together = TILE<M> / v.run;
    int64_t repeat = first / v.rows, row = first % v.rows;
    for (int64_t line = first; line < last; line += together) {
        const int64_t lines = least(together, last - line), n = lines * v.run, until = row + lines;
        for (int64_t i = 0; i < lines; ++i) {
            const One<M> one = parameters<M>(job, (row + i) % v.rows);
            for (int64_t j = i * v.run; j < (i + 1) * v.run; ++j) tile.s[j] = one.s, tile.r[j] = one.r, tile.zp[j] = one.zp;
        }
        lanes.reset(n);
        process(job, line * v.run, n, tile, [&](const Span<X>& span) {
            learn_by_rule<M>(job, span, Each<M>{tile.s, tile.r, tile.zp}, lanes.scale, lanes.lost);
        });
        for (int64_t i = 0; row < until; ++row, i += v.run) {
            const int64_t wrapped = row / v.rows;
            Lanes::halve(lanes.scale + i, v.run, 1);
            Lanes::halve(lanes.lost + i, v.run, 1);
            put_block<M>(job, v.repeat, repeat + wrapped, row - wrapped * v.rows, 1, lanes.scale + i, lanes.lost + i);
        }
        repeat += row / v.rows, row %= v.rows;
    }
}

// One block of the strided segments of columns [c, end). Whole lines go through together, as many as fit a tile.
template <class M, class X>
inline void learn_columns(const Job& job, int64_t row, int64_t block, int64_t c, int64_t end, Tile<M, X>& tile, Lanes& lanes) {
    const View& v = job.p.view;
    const int64_t width = end - c, count = sum_lanes(v), together = width == v.inner ? least(count, TILE<M> / width) : 1;
    const int64_t start = block * count * SUM_STEPS, last = least(v.run, start + count * SUM_STEPS);
    parameters(job, row * v.inner + c, width, tile);
    for (int64_t i = width; i < together * width; ++i)
        tile.s[i] = tile.s[i - width], tile.r[i] = tile.r[i - width], tile.zp[i] = tile.zp[i - width];
    const Each<M> each{tile.s, tile.r, tile.zp};
    const int64_t used = least(count, last - start);
    lanes.reset(used * width);
    for (int64_t line = start, lines; line < last; line += lines) {
        const int64_t lane = (line - start) % count, at = lane * width;
        lines = least(least(together, count - lane), last - line);
        process(job, (row * v.run + line) * v.inner + c, lines * width, tile, [&](const Span<X>& span) {
            if (job.zero_point.data) return learn_by_rule<M>(job, span, each, lanes.scale + at, lanes.lost + at);
            const EachScale<M> scales{each, job.zero_point_number};
            learn_by_rule<M>(job, span, scales, lanes.scale + at, lanes.lost + at);
        });
    }
    lanes.halve(used, width);
    put_block<M>(job, sum_blocks(v), block, row * v.inner + c, width, lanes.scale, lanes.lost);
}

template <class M, class X>
void learn_share(const Job& job, int64_t part, int64_t parts) {
    constexpr int64_t WIDTH = Lanes::SIZE / LEAST_SUM_LANES;
    const View& v = job.p.view;
    const int64_t blocks = sum_blocks(v);
    Tile<M, X> tile;
    Lanes lanes;
    if (v.inner == 1 && v.run < SHORT_RUN) {
        const Range r = share(v.repeat * v.rows, part, parts);
        learn_short_runs<M, X>(job, r.first, r.last, tile, lanes);
    } else if (v.inner == 1) {
        const Range r = share(v.repeat * v.rows * blocks, part, parts);
        for (int64_t i = r.first; i < r.last; ++i) learn_run<M, X>(job, i / blocks, i % blocks, tile, lanes);
    } else {
        prepare(job, tile);
        const int64_t windows = (v.inner + WIDTH - 1) / WIDTH;
        const Range r = share(v.rows * blocks * windows, part, parts);
        for (int64_t i = r.first; i < r.last; ++i) {
            const int64_t c = i % windows * WIDTH, block = i / windows;
            learn_columns<M, X>(job, block / blocks, block % blocks, c, least(v.inner, c + WIDTH), tile, lanes);
        }
    }
    if (job.stream) stream_end();
}

// The blocks of each segment, added up as one block of their own.
template <class M>
void total_share(const Job& job, int64_t part, int64_t parts) {
    const int64_t units = sum_units(job.p.view), segments = job.p.view.segments(), count = units * segments;
    const int64_t used = least(SUM_LANES, units), width = Lanes::SIZE / used;
    const Range r = share((segments + width - 1) / width, part, parts);
    Lanes lanes;
    for (int64_t b = r.first; b < r.last; ++b) {
        const int64_t first = b * width, n = least(width, segments - first);
        lanes.reset(used * n);
        for (int64_t unit = 0; unit < units; ++unit) {
            double *scale = lanes.scale + unit % SUM_LANES * n, *lost = lanes.lost + unit % SUM_LANES * n;
            const double* from = job.sums + unit * segments + first;
            IVDEP for (int64_t i = 0; i < n; ++i) scale[i] += from[i];
            IVDEP for (int64_t i = 0; i < n; ++i) lost[i] += from[count + i];
        }
        lanes.halve(used, n);
        put_gradients<M>(job, first, n, lanes.scale, lanes.lost);
    }
}

}  // namespace
}  // namespace baracuda
