// How a tensor is walked: in tiles that stay in the first-level cache. A tile is loaded into the math type, computed,
// narrowed or packed, and stored; scales are one for a long run, or spread out over the tile. Included once per
// instruction set.
#pragma once
#include "formulas.hpp"

namespace baracuda {
namespace {

constexpr int64_t TILE_BYTES = 4096;
template <class M>
constexpr int64_t TILE = TILE_BYTES / int64_t(sizeof(M));
// Runs shorter than this have their scales spread out: a loop of its own for each would not fill the vectors.
constexpr int64_t SHORT_RUN = 32;

template <class M>
constexpr int code_of = sizeof(M) == 2 ? BF16 : sizeof(M) == 4 ? F32 : F64;

struct Range {
    int64_t first, last;
};

inline Range share(int64_t n, int64_t part, int64_t parts) {
    return {n / parts * part + least(part, n % parts), n / parts * (part + 1) + least(part + 1, n % parts)};
}

// The nearest place at or before `e` where a byte of 4-bit pairs begins.
inline int64_t whole_byte(const Problem& p, int64_t e) {
    return is_packed(p.quantized) && p.last > 0 ? e - (e % p.last) % 2 : e;
}

// Calls body(row, column, offset, length) for the pieces of [e, e + n) that lie in one row of the tensor.
template <class Body>
inline void pieces(int64_t length, int64_t e, int64_t n, Body body) {
    int64_t row = e / length, column = e % length;
    for (int64_t done = 0; done < n;) {
        int64_t size = least(length - column, n - done);
        body(row, column, done, size);
        done += size, column = 0, ++row;
    }
}

// Data moves from the last buffer to the first. In this order, and a line further apart than a page, no load waits for
// the store before it that looks like its own in the low twelve bits of the address. X is what floats are held as: the
// math type M, or bf16 as stored.
template <class M, class X = M>
struct Tile {
    static constexpr int64_t SIZE = TILE<M> + 64 / sizeof(M);  // one more than TILE where a byte of pairs would be cut
    static constexpr int64_t COLUMNS = 4096 + 64;              // strided segments whose parameters are kept
    alignas(64) char stored[SIZE * sizeof(M)];
    alignas(64) uint8_t q[SIZE];
    alignas(64) X y[SIZE];
    alignas(64) X dy[SIZE];
    alignas(64) X x[SIZE];
    alignas(64) M s[COLUMNS];
    alignas(64) M r[COLUMNS];
    alignas(64) int32_t zp[COLUMNS];
    const char *ahead = nullptr, *ahead_end = nullptr;  // what will be read next, to be fetched while this is computed

    void fetch_ahead(int64_t bytes) {
        const char* end = ahead_end - ahead < bytes ? ahead_end : ahead + bytes;
        for (; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
    }
};

template <class X>
inline const X* load(const Rows& from, int code, int64_t e, int64_t n, X* buffer) {
    if (from.dense) {
        if (code == code_of<X>) return reinterpret_cast<const X*>(from.data) + e;
        widen<X>(code, from.data, e, n, buffer);
    } else {
        pieces(from.length, e, n, [&](int64_t row, int64_t column, int64_t done, int64_t size) {
            widen<X>(code, from.data, row * from.pitch + column, size, buffer + done);
        });
    }
    return buffer;
}

inline const uint8_t* load_quantized(const Rows& from, int code, int64_t e, int64_t n, uint8_t* buffer) {
    const uint8_t* data = reinterpret_cast<const uint8_t*>(from.data);
    if (!is_packed(code) && from.dense) return data + e;
    if (is_packed(code) && from.dense && from.length % 2 == 0) {
        unpack(data + e / 2, n, code == S4, buffer);
        return buffer;
    }
    pieces(from.length, e, n, [&](int64_t row, int64_t column, int64_t done, int64_t size) {
        if (is_packed(code)) {
            unpack(data + row * from.pitch + column / 2, size, code == S4, buffer + done);
        } else {
            memcpy(buffer + done, data + row * from.pitch + column, size);
        }
    });
    return buffer;
}

inline void put(bool streamed, char* to, const char* from, int64_t n) {
    if (streamed) {
        stream(to, from, n);
    } else if (to != from) {
        memcpy(to, from, n);
    }
}

template <class M, class X>
inline void store(const Job& job, int64_t e, int64_t n, const X* y, Tile<M, X>& tile) {
    char* to = job.out.data + e * bytes_of(job.p.element);
    if (job.p.element == code_of<X>) return put(job.stream, to, reinterpret_cast<const char*>(y), n * sizeof(X));
    if constexpr (sizeof(X) > 2) {
        if (!job.stream) return narrow<X>(job.p.element, y, n, to);
        narrow<X>(job.p.element, y, n, tile.stored);
        stream(to, tile.stored, n * bytes_of(job.p.element));
    }
}

template <class M, class X>
inline void store_quantized(const Job& job, int64_t e, int64_t n, const uint8_t* q, Tile<M, X>& tile) {
    if (!is_packed(job.p.quantized))
        return put(job.stream, job.out.data + e, reinterpret_cast<const char*>(q), n);
    const int64_t length = job.out.length;
    uint8_t* packed_tile = reinterpret_cast<uint8_t*>(tile.stored);
    if (length % 2 == 0) {
        pack(q, n, packed_tile);
        return put(job.stream, job.out.data + e / 2, tile.stored, n / 2);
    }
    uint8_t* out = reinterpret_cast<uint8_t*>(job.out.data);
    pieces(length, e, n, [&](int64_t row, int64_t column, int64_t done, int64_t size) {
        pack(q + done, size, out + row * job.out.pitch + column / 2);
    });
}

// -- scales and zero points --------------------------------------------------------------------------------------

inline int64_t place(const Rows& rows, int64_t i) {
    return rows.dense ? i : i / rows.length * rows.pitch + i % rows.length;
}

inline int32_t clamped(int32_t zp) {
    return zp < -MAX_ZERO_POINT ? -MAX_ZERO_POINT : zp > MAX_ZERO_POINT ? MAX_ZERO_POINT : zp;
}

template <class M>
inline M scale_of(const Job& job, int64_t segment) {
    if (!job.scale.data) return M(job.scale_number);
    return widened<M>(job.scale_code, job.scale.data, place(job.scale, segment));
}

inline int32_t zero_point_of(const Job& job, int64_t segment) {
    if (!job.zero_point.data) return job.zero_point_number;
    return clamped(reinterpret_cast<const int32_t*>(job.zero_point.data)[place(job.zero_point, segment)]);
}

template <class M>
inline One<M> parameters(const Job& job, int64_t segment) {
    M s = scale_of<M>(job, segment);
    return {s, M(1) / s, zero_point_of(job, segment)};
}

// What is one number for the whole tensor is spread out once.
template <class M, class X>
inline void prepare(const Job& job, Tile<M, X>& tile) {
    const int64_t n = job.p.view.inner > Tile<M, X>::SIZE ? Tile<M, X>::COLUMNS : Tile<M, X>::SIZE;
    if (!job.zero_point.data)
        for (int64_t i = 0; i < n; ++i) tile.zp[i] = job.zero_point_number;
    if (!job.scale.data)
        for (int64_t i = 0; i < n; ++i) tile.s[i] = M(job.scale_number);
}

// The parameters of n consecutive segments, one each, in the tile.
template <class M, class X>
inline void parameters(const Job& job, int64_t segment, int64_t n, Tile<M, X>& tile) {
    if (!job.scale.data) {
        // prepared
    } else if (!job.scale.dense) {
        for (int64_t i = 0; i < n; ++i) tile.s[i] = scale_of<M>(job, segment + i);
    } else {
        widen<M>(job.scale_code, job.scale.data, segment, n, tile.s);
    }
    if (!job.zero_point.data) {
        // prepared
    } else if (!job.zero_point.dense) {
        for (int64_t i = 0; i < n; ++i) tile.zp[i] = zero_point_of(job, segment + i);
    } else {
        const int32_t* from = reinterpret_cast<const int32_t*>(job.zero_point.data) + segment;
        IVDEP for (int64_t i = 0; i < n; ++i) tile.zp[i] = clamped(from[i]);
    }
    if (job.p.reciprocal) {
        IVDEP for (int64_t i = 0; i < n; ++i) tile.r[i] = M(1) / tile.s[i];
    }
}

inline bool writes_integers(int op) { return op == QUANTIZE || op == DYNAMIC_QUANTIZE; }

// Runs from this length on are worth the search for the ends of the range.
constexpr int64_t LONG_RUN = 512;

template <class M, class X>
inline void dequantize_one(const Job& job, const Span<X>& span, const One<M>& one) {
    if (!(magnitude(one.s) < M(__builtin_inff()))) return apply<DIVIDE, M>(job.p, span, one);
    if constexpr (HAS_LOOKUP && sizeof(M) == 4) {
        constexpr int LENGTH = 64 / sizeof(X);
        if (is_packed(job.p.quantized) && span.n >= 2 * LENGTH) {  // few values: each is computed once
            uint8_t q[LENGTH];
            X table[LENGTH];
            const int sign = job.p.quantized == S4 ? LENGTH / 2 : 0;
            for (int i = 0; i < LENGTH; ++i) q[i] = uint8_t((i ^ sign) - sign);
            dequantize_finite<int8_t>(q, table, LENGTH, one);
            return look_up(table, span.q, span.y, span.n);
        }
    }
    if (job.p.quantized == U8) return dequantize_finite<uint8_t>(span.q, span.y, span.n, one);
    dequantize_finite<int8_t>(span.q, span.y, span.n, one);
}

template <class M, class X>
inline void apply_one(const Job& job, const Span<X>& span, const One<M>& one, const Passes<M>* passes) {
    if (job.p.op == DEQUANTIZE) return dequantize_one(job, span, one);
    if (job.p.reciprocal) return apply<RECIPROCAL, M>(job.p, span, one);
    if (passes) return backward(job.p.op == QUANTIZE_BACKWARD, span.x, span.dy, span.y, span.n, one, *passes);
    if constexpr (sizeof(M) == 4) {
        if (Corrected::possible(one.s, one.zp)) {
            const Corrected c(one, job.p.q_min, job.p.q_max);
            if (writes_integers(job.p.op)) return quantize_corrected(span.x, span.q_out, span.n, c);
            if (job.p.op == FAKE_QUANTIZE) return fake_quantize_corrected(span.x, span.y, span.n, c);
        }
    }
    apply<DIVIDE, M>(job.p, span, one);
}

// The tile's parameters from the i-th on.
template <class M, class X>
inline void apply_each(const Job& job, const Span<X>& span, const Tile<M, X>& tile, int64_t i) {
    const Each<M> each{tile.s + i, tile.r + i, tile.zp + i};
    if (job.p.reciprocal) return apply<RECIPROCAL, M>(job.p, span, each);
    if (job.zero_point.data) return apply<DIVIDE, M>(job.p, span, each);
    apply<DIVIDE, M>(job.p, span, EachScale<M>{each, job.zero_point_number});
}

// -- tiles -------------------------------------------------------------------------------------------------------

// Loads what the op reads of [e, e + n), calls compute(span), and stores.
template <class M, class X, class Compute>
inline void process(const Job& job, int64_t e, int64_t n, Tile<M, X>& tile, Compute compute) {
    const int op = job.p.op;
    tile.fetch_ahead(n * bytes_of(job.p.element));
    Span<X> span{nullptr, nullptr, nullptr, tile.y, tile.q, n};
    if (op == DEQUANTIZE) {
        span.q = load_quantized(job.x, job.p.quantized, e, n, tile.q);
    } else if (op != DEQUANTIZE_BACKWARD) {
        span.x = load<X>(job.x, job.p.element, e, n, tile.x);
    }
    if (job.dy.data) span.dy = load<X>(job.dy, job.p.element, e, n, tile.dy);
    const bool integers = writes_integers(op);
    if (!job.stream && integers && !is_packed(job.p.quantized))
        span.q_out = reinterpret_cast<uint8_t*>(job.out.data) + e;
    if (!job.stream && !integers && job.p.element == code_of<X>) span.y = reinterpret_cast<X*>(job.out.data) + e;
    compute(span);
    if (integers) {
        store_quantized(job, e, n, span.q_out, tile);
    } else {
        store(job, e, n, span.y, tile);
    }
}

template <class X>
inline Span<X> part_of(const Span<X>& s, int64_t first, int64_t n) {
    return {s.x ? s.x + first : nullptr,   s.dy ? s.dy + first : nullptr, s.q ? s.q + first : nullptr,
            s.y ? s.y + first : nullptr, s.q_out + first,               n};
}

// Segments of dense runs (inner == 1): [first, last) in memory order.
template <class M, class X>
void walk_runs(const Job& job, int64_t first, int64_t last, Tile<M, X>& tile) {
    const View& v = job.p.view;
    const bool spread = v.run < SHORT_RUN;
    const int64_t tiles = (last - first + TILE<M> - 1) / TILE<M>;
    const bool masks = !job.p.reciprocal && v.run >= LONG_RUN &&
                       (job.p.op == QUANTIZE_BACKWARD || job.p.op == FAKE_QUANTIZE_BACKWARD);
    int64_t known = -1;
    One<M> one{};
    Passes<M> passes;
    bool passable = false;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t e = t == 0 ? first : whole_byte(job.p, first + t * TILE<M>);
        const int64_t n = (t + 1 == tiles ? last : whole_byte(job.p, first + (t + 1) * TILE<M>)) - e;
        process(job, e, n, tile, [&](const Span<X>& span) {
            int64_t row = e / v.run % v.rows, offset = e % v.run;
            for (int64_t i = 0; i < n;) {
                int64_t size = least(v.run - offset, n - i);
                if (row != known) {
                    one = parameters<M>(job, row), known = row;
                    passable = masks && Passes<M>::possible(one.s, one.zp);
                    if (passable) passes = Passes<M>(one, job.p.q_min, job.p.q_max);
                }
                if (spread) {
                    for (int64_t j = i; j < i + size; ++j) tile.s[j] = one.s;
                    if (job.p.reciprocal)
                        for (int64_t j = i; j < i + size; ++j) tile.r[j] = one.r;
                    if (job.zero_point.data)
                        for (int64_t j = i; j < i + size; ++j) tile.zp[j] = one.zp;
                } else {
                    apply_one(job, part_of(span, i, size), one, passable ? &passes : nullptr);
                }
                i += size, offset = 0;
                if (++row == v.rows) row = 0;
            }
            if (spread) apply_each(job, span, tile, 0);
        });
    }
}

// Strided segments (inner > 1), the scales change along a line of `inner` elements: columns [c, end) of the lines
// [first, last) of a row, which share their parameters. `ahead` elements further lies what will be read next.
template <class M, class X>
void walk_columns(const Job& job, int64_t row, int64_t first, int64_t last, int64_t c, int64_t end, int64_t ahead,
                  Tile<M, X>& tile) {
    const View& v = job.p.view;
    const int64_t bytes = bytes_of(job.p.element);
    const Rows& read = job.p.op == DEQUANTIZE_BACKWARD ? job.dy : job.x;
    auto one_tile = [&](int64_t e, int64_t n, int64_t i) {
        if (read.dense && job.p.op != DEQUANTIZE) {
            tile.ahead = read.data + least(e + ahead, v.numel()) * bytes;
            tile.ahead_end = read.data + least(e + ahead + n, v.numel()) * bytes;
        }
        process(job, e, n, tile, [&](const Span<X>& span) { apply_each(job, span, tile, i); });
    };
    const int64_t width = end - c, start = row * v.run * v.inner;
    parameters(job, row * v.inner + c, width, tile);
    if (width == v.inner && 2 * width <= TILE<M>) {  // whole lines share a tile
        const int64_t together = least(TILE<M> / width, last - first), size = together * width;
        for (int64_t i = width; i < size; ++i) tile.s[i] = tile.s[i - width];
        for (int64_t i = width; i < size; ++i) tile.r[i] = tile.r[i - width];
        for (int64_t i = width; i < size; ++i) tile.zp[i] = tile.zp[i - width];
        for (int64_t e = first * width; e < last * width; e += size)
            one_tile(start + e, least(size, last * width - e), 0);
        return;
    }
    for (int64_t line = first; line < last; ++line)
        for (int64_t from = c, to; from < end; from = to) {
            to = end - from <= TILE<M> ? end : whole_byte(job.p, from + TILE<M>);
            one_tile(start + line * v.inner + from, to - from, from - c);
        }
}

// Lines [first, last) of a row in memory order, or a few at a time where lines are too long to keep their parameters.
template <class M, class X>
void walk_lines(const Job& job, int64_t row, int64_t first, int64_t last, Tile<M, X>& tile) {
    constexpr int64_t LINES = 16, WIDTH = 4096;
    const int64_t inner = job.p.view.inner;
    if (inner <= WIDTH) return walk_columns(job, row, first, last, 0, inner, TILE<M>, tile);
    for (int64_t line = first; line < last; line += LINES)
        for (int64_t c = 0, end; c < inner; c = end) {
            end = inner - c <= WIDTH ? inner : whole_byte(job.p, c + WIDTH);
            walk_columns(job, row, line, least(last, line + LINES), c, end, TILE<M>, tile);
        }
}

// -- what threads share out --------------------------------------------------------------------------------------

// body(row, first line, last line) for the lines of the range, cut at the ends of rows.
template <class Body>
inline void each_lines(const View& v, Range r, Body body) {
    for (int64_t line = r.first; line < r.last;) {
        const int64_t row = line / v.run, first = line % v.run, last = least(v.run, first + r.last - line);
        body(row, first, last);
        line += last - first;
    }
}

// body(part of the range), its later parts first where `backwards` is set: a pass that follows another finds the end of
// its range in the cache. Parts are long, since prefetchers look ahead only.
template <class Body>
inline void in_order(Range r, int64_t size, bool backwards, Body body) {
    if (!backwards) return body(r);
    for (int64_t last = r.last; last > r.first; last -= size) body(Range{last - size > r.first ? last - size : r.first, last});
}

template <class M, class X>
void walk(const Job& job, int64_t part, int64_t parts, bool backwards) {
    constexpr int64_t FAR = 1 << 18;  // elements
    const View& v = job.p.view;
    Tile<M, X> tile;
    if (v.inner > 1 || v.run < SHORT_RUN) prepare(job, tile);
    if (v.inner == 1) {
        const int64_t n = v.numel(), tiles = (n + TILE<M> - 1) / TILE<M>;
        in_order(share(tiles, part, parts), FAR / TILE<M>, backwards, [&](Range r) {
            const int64_t last = r.last == tiles ? n : whole_byte(job.p, r.last * TILE<M>);
            walk_runs(job, whole_byte(job.p, r.first * TILE<M>), last, tile);
        });
    } else {
        in_order(share(v.rows * v.run, part, parts), 1 + FAR / v.inner, backwards, [&](Range r) {
            each_lines(v, r, [&](int64_t row, int64_t first, int64_t last) { walk_lines(job, row, first, last, tile); });
        });
    }
    if (job.stream) stream_end();
}

}  // namespace
}  // namespace baracuda
