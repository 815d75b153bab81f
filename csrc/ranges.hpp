// Dynamic ranges: the least and greatest of each segment as integer keys, then its scale and zero point. Included once
// per instruction set.
//
// A float's bits, made an integer that orders alike, turn every minimum and maximum into one of integers: exact, free
// of order, and a NaN stays on the outside where it is seen.
#pragma once
#include "walk.hpp"

namespace baracuda {
namespace {

template <class I>
constexpr I MOST = I((uint64_t(1) << (8 * sizeof(I) - 1)) - 1);

template <bool ASYMMETRIC, class I>
inline I key(I x) {
    return ASYMMETRIC ? I(x ^ (I(x >> (8 * sizeof(I) - 1)) & MOST<I>)) : I(x & MOST<I>);
}

// The float a key came from; asymmetric keys are their own inverse, symmetric ones are magnitudes already.
template <class M>
inline M value_of(int element, bool asymmetric, int64_t k) {
    if (element == F64) {
        int64_t x = asymmetric ? key<true>(k) : k;
        return M(bits<double>(x));
    }
    if (element == F32) {
        int32_t x = asymmetric ? key<true>(int32_t(k)) : int32_t(k);
        return M(bits<float>(x));
    }
    uint16_t x = uint16_t(asymmetric ? key<true>(int16_t(k)) : int16_t(k));
    return M(element == F16 ? from_f16(x) : from_bf16(x));
}

// Where the keys of segments [first, ...) are gathered: in the workspace by several threads, or by one on its stack.
struct Keys {
    int64_t *most, *low;
    int64_t first;
    bool shared;
};

inline void merge(int64_t* slot, int64_t k, bool greatest, bool shared) {
    int64_t old = __atomic_load_n(slot, __ATOMIC_RELAXED);
    while (greatest ? k > old : k < old) {
        if (!shared) {
            *slot = k;
            return;
        }
        if (__atomic_compare_exchange_n(slot, &old, k, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
    }
}

template <bool ASYMMETRIC, class I>
inline void extremes(const I* x, int64_t n, I& most, I& low) {
    I m = most, l = low;
    for (int64_t i = 0; i < n; ++i) {
        I k = key<ASYMMETRIC>(x[i]);
        m = k > m ? k : m;
        if (ASYMMETRIC) l = k < l ? k : l;
    }
    most = m, low = l;
}

// The extremes of a window of columns: wide, so that lines are read in memory order or nearly so.
template <class I>
struct Extremes {
    static constexpr int64_t WIDTH = (16 << 10) / sizeof(I);
    alignas(64) I most[WIDTH];
    alignas(64) I low[WIDTH];
};

template <bool ASYMMETRIC, class I>
inline void reduce_runs(const Job& job, int64_t first, int64_t last, const Keys& keys) {
    const View& v = job.p.view;
    const I* data = reinterpret_cast<const I*>(job.x.data);
    if (first == last) return;
    int64_t row = first / v.run % v.rows, offset = first % v.run;
    for (int64_t e = first; e < last;) {
        const int64_t n = least(v.run - offset, last - e);
        I most = ASYMMETRIC ? I(-MOST<I> - 1) : I(0), low = MOST<I>;
        if (job.x.dense) {
            extremes<ASYMMETRIC>(data + e, n, most, low);
        } else {
            pieces(job.x.length, e, n, [&](int64_t r, int64_t column, int64_t, int64_t size) {
                extremes<ASYMMETRIC>(data + r * job.x.pitch + column, size, most, low);
            });
        }
        merge(keys.most + row - keys.first, most, true, keys.shared);
        if (ASYMMETRIC) merge(keys.low + row - keys.first, low, false, keys.shared);
        e += n, offset = 0;
        if (++row == v.rows) row = 0;
    }
}

// The lines begin `pitch` apart; several at once, since the extremes are read and written for each.
template <bool ASYMMETRIC, int LINES, class I>
inline void update(const I* x, int64_t pitch, I* most, I* low, int64_t n) {
    IVDEP for (int64_t i = 0; i < n; ++i) {
        I m = most[i], l = low[i];
#pragma GCC unroll 4
        for (int j = 0; j < LINES; ++j) {
            I k = key<ASYMMETRIC>(x[j * pitch + i]);
            m = k > m ? k : m;
            if (ASYMMETRIC) l = k < l ? k : l;
        }
        most[i] = m;
        if (ASYMMETRIC) low[i] = l;
    }
}

template <bool ASYMMETRIC, class I>
inline void reduce_columns(const Job& job, int64_t row, int64_t first, int64_t last, int64_t c, int64_t end,
                           const Keys& keys, Extremes<I>& found) {
    const View& v = job.p.view;
    const I* data = reinterpret_cast<const I*>(job.x.data);
    const int64_t width = end - c, segment = row * v.inner + c - keys.first;
    for (int64_t i = 0; i < width; ++i) found.most[i] = ASYMMETRIC ? I(-MOST<I> - 1) : I(0), found.low[i] = MOST<I>;
    for (int64_t line = first; line < last;) {
        const int64_t e = (row * v.run + line) * v.inner + c;
        if (job.x.dense && line + 4 <= last) {
            update<ASYMMETRIC, 4>(data + e, v.inner, found.most, found.low, width);
            line += 4;
            continue;
        }
        pieces(job.x.length, e, width, [&](int64_t r, int64_t column, int64_t done, int64_t size) {
            update<ASYMMETRIC, 1>(data + r * job.x.pitch + column, 0, found.most + done, found.low + done, size);
        });
        ++line;
    }
    for (int64_t i = 0; i < width; ++i) {
        merge(keys.most + segment + i, found.most[i], true, keys.shared);
        if (ASYMMETRIC) merge(keys.low + segment + i, found.low[i], false, keys.shared);
    }
}

// Calls body with a value of the integer type of the element's size.
template <class Body>
inline void by_size(int element, Body body) {
    if (element == F64) return body(int64_t());
    if (element == F32) return body(int32_t());
    body(int16_t());
}

template <class Body>
inline void by_mode(const Problem& p, Body body) {
    by_size(p.element, [&](auto zero) {
        if (p.asymmetric) {
            body(std::true_type(), zero);
        } else {
            body(std::false_type(), zero);
        }
    });
}

// -- scale and zero point ----------------------------------------------------------------------------------------

template <class M>
inline M not_a_number() {
    return canonical(M(__builtin_nanf("")));
}

// Rounded to its storage type first, then kept away from zero; an all-zero segment gets 1.
template <class M>
inline M stored_scale(const Problem& p, M scale, bool all_zero) {
    const double smallest = p.scale_element == F16 ? 0x1p-24 : p.scale_element == F64 ? 0x1p-1022 : 0x1p-126;
    if (p.scale_element == F16) scale = M(from_f16(to_f16(float(scale))));
    if (p.scale_element == BF16) scale = M(from_bf16(to_bf16(float(scale))));
    scale = scale < M(smallest) ? M(smallest) : scale;
    return canonical(all_zero ? M(1) : scale);
}

template <class M>
inline M asymmetric_scale(const Problem& p, M low, M high) {
    const M levels = M(p.q_max - p.q_min), width = high - low;
    const M halved = (high * M(0.5) - low * M(0.5)) / M((p.q_max - p.q_min) / 2.0);
    M scale = magnitude(width) == M(__builtin_inff()) ? halved : width / levels;
    return stored_scale<M>(p, low == high ? magnitude(low) : scale, (low == 0) & (high == 0));
}

template <class M>
inline M asymmetric(const Problem& p, M low, M high, int32_t& zero_point) {
    const M low_zero = low > 0 ? M(0) : low, high_zero = high < 0 ? M(0) : high;
    bool includes = p.include_zero;
    if (includes) low = low_zero, high = high_zero;
    M scale = asymmetric_scale<M>(p, low, high);
    // Far from zero the literal formula's zero point would swallow the data: such a segment includes zero.
    if (magnitude(low / scale) > M(0x1p22)) {
        includes = true;
        low = low_zero, high = high_zero;
        scale = asymmetric_scale<M>(p, low, high);
    }
    M t = rounded(p.reciprocal ? low * (M(1) / scale) : low / scale);
    M z = M(p.q_min) - (t == t ? t : M(0));
    z = z < M(-MAX_ZERO_POINT) ? M(-MAX_ZERO_POINT) : z > M(MAX_ZERO_POINT) ? M(MAX_ZERO_POINT) : z;
    // By a scale that was rounded down to 16 bits, the range may reach a step beyond q_max; zero stays inside.
    if (includes && z > M(p.q_max)) z = M(p.q_max);
    zero_point = int32_t(z);
    return scale;
}

template <class M>
inline void values_of(const Problem& p, const int64_t* keys, int64_t n, M* values) {
    const bool asymmetric = p.asymmetric;
    if (p.element == F64) {
        IVDEP for (int64_t i = 0; i < n; ++i) values[i] = value_of<M>(F64, asymmetric, keys[i]);
    } else if (p.element == F32) {
        IVDEP for (int64_t i = 0; i < n; ++i) values[i] = value_of<M>(F32, asymmetric, keys[i]);
    } else if (p.element == BF16) {
        IVDEP for (int64_t i = 0; i < n; ++i) values[i] = value_of<M>(BF16, asymmetric, keys[i]);
    } else {
        IVDEP for (int64_t i = 0; i < n; ++i) values[i] = value_of<M>(F16, asymmetric, keys[i]);
    }
}

template <class M>
void finish_segments(const Job& job, int64_t first, int64_t last, const Keys& keys) {
    constexpr int64_t BATCH = 256;
    const Problem p = job.p;
    const bool empty = p.view.segment_length() == 0;  // without keys, then
    M high[BATCH], low[BATCH], scale[BATCH];
    int32_t zero_point[BATCH];
    for (int64_t at = first; at < last; at += BATCH) {
        const int64_t n = least(BATCH, last - at);
        if (empty) {
            for (int64_t i = 0; i < n; ++i) scale[i] = 1, zero_point[i] = p.asymmetric ? p.q_min : 0;
        } else if (p.asymmetric) {
            values_of<M>(p, keys.most + at - keys.first, n, high);
            values_of<M>(p, keys.low + at - keys.first, n, low);
            for (int64_t i = 0; i < n; ++i) {
                const bool poisoned = (low[i] != low[i]) | (high[i] != high[i]);
                low[i] = poisoned ? not_a_number<M>() : low[i], high[i] = poisoned ? not_a_number<M>() : high[i];
                scale[i] = asymmetric<M>(p, low[i], high[i], zero_point[i]);
            }
        } else {
            values_of<M>(p, keys.most + at - keys.first, n, high);
            const M q_max = M(p.q_max);
            IVDEP for (int64_t i = 0; i < n; ++i) {
                scale[i] = stored_scale<M>(p, high[i] / q_max, high[i] == 0);
                zero_point[i] = 0;
            }
        }
        narrow<M>(p.scale_element, scale, n, static_cast<char*>(job.scale_out) + at * bytes_of(p.scale_element));
        if (job.zero_point_out) memcpy(job.zero_point_out + at, zero_point, n * sizeof(int32_t));
    }
}

// The quantize step reads back the scales just stored.
inline Job quantize_step(const Job& job) {
    Job step = job;
    if (job.p.op == DYNAMIC_FAKE_QUANTIZE) step.p.op = FAKE_QUANTIZE;
    step.scale.data = static_cast<char*>(job.scale_out);
    step.scale_code = job.p.scale_element;
    step.zero_point.data = reinterpret_cast<char*>(job.zero_point_out);
    step.zero_point_number = 0;
    step.scale.dense = step.zero_point.dense = true;
    return step;
}

// -- schedules ---------------------------------------------------------------------------------------------------

constexpr int64_t BLOCK_ELEMENTS = 16384;

struct BlockKeys {
    int64_t most[BLOCK_SEGMENTS + 1];  // one more where a byte of pairs would be cut
    int64_t low[BLOCK_SEGMENTS + 1];
};

inline Keys reset(Keys keys, int64_t n, bool asymmetric) {
    for (int64_t i = 0; i < n; ++i) keys.most[i] = asymmetric ? INT64_MIN : 0;
    if (asymmetric)
        for (int64_t i = 0; i < n; ++i) keys.low[i] = INT64_MAX;
    return keys;
}

// Whole segments at a time: found, finished and quantized while they are in the cache.
template <class M, class X>
void fused(const Job& job, int64_t part, int64_t parts) {
    const Problem& p = job.p;
    const View& v = p.view;
    const bool quantizes = p.op != CHOOSE_QPARAMS;
    const Job step = quantize_step(job);
    Tile<M, X> tile;
    BlockKeys block;
    if (v.inner > 1 || v.run < SHORT_RUN) prepare(step, tile);
    if (v.inner == 1) {
        // Segments whose ends share a byte stay together.
        const int64_t together = is_packed(p.quantized) && v.run > 0 && v.run < p.last ? p.last / v.run : 1;
        int64_t rows = least(BLOCK_SEGMENTS, v.run < BLOCK_ELEMENTS ? BLOCK_ELEMENTS / (v.run ? v.run : 1) : 1);
        rows = rows > together ? rows / together * together : together;
        const Range range = share((v.rows + rows - 1) / rows, part, parts);
        for (int64_t b = range.first; b < range.last; ++b) {
            const int64_t first = b * rows, last = least(v.rows, first + rows);
            const Keys keys = reset({block.most, block.low, first, false}, last - first, p.asymmetric);
            by_mode(p, [&](auto mode, auto zero) {
                reduce_runs<decltype(mode)::value, decltype(zero)>(job, first * v.run, last * v.run, keys);
            });
            finish_segments<M>(job, first, last, keys);
            if (!quantizes) continue;
            if (job.x.dense && b + 1 < range.last) {
                const int64_t size = bytes_of(p.element) * v.run;
                tile.ahead = job.x.data + last * size;
                tile.ahead_end = job.x.data + least(v.rows, last + rows) * size;
            }
            walk_runs(step, first * v.run, last * v.run, tile);
        }
    } else {
        const int64_t width = block_columns(v, bytes_of(p.element)), windows = (v.inner + width - 1) / width;
        const Range range = share(v.rows * windows, part, parts);
        for (int64_t b = range.first; b < range.last; ++b) {
            const int64_t row = b / windows, w = b % windows;
            const int64_t c = whole_byte(p, w * width);
            const int64_t end = w + 1 == windows ? v.inner : whole_byte(p, (w + 1) * width);
            const int64_t first = row * v.inner + c, next = w + 1 == windows ? v.inner * v.run - c : width;
            const Keys keys = reset({block.most, block.low, first, false}, end - c, p.asymmetric);
            by_mode(p, [&](auto mode, auto zero) {
                Extremes<decltype(zero)> found;
                reduce_columns<decltype(mode)::value>(job, row, 0, v.run, c, end, keys, found);
            });
            finish_segments<M>(job, first, first + end - c, keys);
            if (quantizes) walk_columns(step, row, 0, v.run, c, end, next, tile);
        }
    }
    if (job.stream) stream_end();
}

inline Keys shared_keys(const Job& job) {
    return {job.keys, job.keys ? job.keys + job.p.view.segments() : nullptr, 0, true};
}

// The shares of the quantize step that follows, so that it finds the end of its own share in the cache.
template <class M>
void reduce_share(const Job& job, int64_t part, int64_t parts) {
    const View& v = job.p.view;
    const Keys keys = shared_keys(job);
    by_mode(job.p, [&](auto mode, auto zero) {
        constexpr bool ASYMMETRIC = decltype(mode)::value;
        using I = decltype(zero);
        if (v.inner == 1) {
            const int64_t n = v.numel(), tiles = (n + TILE<M> - 1) / TILE<M>;
            const Range r = share(tiles, part, parts);
            reduce_runs<ASYMMETRIC, I>(job, r.first * TILE<M>, least(n, r.last * TILE<M>), keys);
        } else {
            Extremes<I> found;
            each_lines(v, share(v.rows * v.run, part, parts), [&](int64_t row, int64_t first, int64_t last) {
                for (int64_t c = 0; c < v.inner; c += found.WIDTH)
                    reduce_columns<ASYMMETRIC>(job, row, first, last, c, least(v.inner, c + found.WIDTH), keys, found);
            });
        }
    });
}

}  // namespace
}  // namespace baracuda
