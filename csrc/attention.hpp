// Attention of single tokens: softmax(q . k * scale) . v over the keys that a token attends to, in one order of summation.
// Included once per instruction set.
//
// The keys that are attended to are taken in order, ATTENTION_CHUNK at a time; those that a mask leaves out are not counted,
// so padding moves no key into another chunk. A score: 16 lanes add up every 16th product; then the upper half of the lanes
// is added to the lower until one is left. A chunk's weights are exp(score - its greatest score); their sum has lanes
// again, and values are added by rising key. Chunks are merged in order. All of it is f32, each operation rounded once.
#pragma once
#include "activation.hpp"
#include "produce.hpp"

namespace baracuda {
namespace {

constexpr int64_t KEY_TILE = 32;

#if defined(__AVX512F__)
constexpr int64_t REGISTER = 16;
#elif defined(__AVX__)
constexpr int64_t REGISTER = 8;
#else
constexpr int64_t REGISTER = 4;
#endif
using Register = float __attribute__((vector_size(REGISTER * sizeof(float))));  // the widest register
using Four = float __attribute__((vector_size(4 * sizeof(float))));

// The upper half is added to the lower until four are left.
ALWAYS_INLINE Four quartered(Four x) { return x; }
#if defined(__AVX__)
ALWAYS_INLINE Four quartered(__m256 x) { return Four(_mm256_castps256_ps128(x)) + Four(_mm256_extractf128_ps(x, 1)); }
#endif
#if defined(__AVX512F__)
ALWAYS_INLINE Four quartered(__m512 x) {
    const __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1);
    return quartered(_mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(high)));
}
#endif

// ATTENTION_LANES numbers in registers.
struct Sixteen {
    static constexpr int PARTS = ATTENTION_LANES / REGISTER;
    Register part[PARTS];

    static ALWAYS_INLINE Sixteen at(const float* from) {
        Sixteen x;
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) memcpy(&x.part[i], from + i * REGISTER, sizeof(Register));
        return x;
    }
    ALWAYS_INLINE void add(const Sixteen& x) {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) part[i] += x.part[i];
    }
    ALWAYS_INLINE void add_product(const Sixteen& x, const Sixteen& y) {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) part[i] += x.part[i] * y.part[i];
    }
    ALWAYS_INLINE void add_product(float x, const Sixteen& y) {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) part[i] += x * y.part[i];
    }
    ALWAYS_INLINE void store(float* to) const {
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; ++i) memcpy(to + i * REGISTER, &part[i], sizeof(Register));
    }

    ALWAYS_INLINE Four quarter() const {
        Sixteen x = *this;
#pragma GCC unroll 4
        for (int half = PARTS / 2; half; half /= 2)
#pragma GCC unroll 4
            for (int i = 0; i < half; ++i) x.part[i] += x.part[i + half];
        return quartered(x.part[0]);
    }
};

// Of each of four, the sum of its lanes: the upper half is added to the lower until one is left.
ALWAYS_INLINE Four halved(const Sixteen (&sums)[4]) {
    const Four a = sums[0].quarter(), b = sums[1].quarter(), c = sums[2].quarter(), d = sums[3].quarter();
    const Four ab = Four{a[0], b[0], a[1], b[1]} + Four{a[2], b[2], a[3], b[3]};
    const Four cd = Four{c[0], d[0], c[1], d[1]} + Four{c[2], d[2], c[3], d[3]};
    return Four{ab[0], ab[1], cd[0], cd[1]} + Four{ab[2], ab[3], cd[2], cd[3]};
}

ALWAYS_INLINE float exponential(float a) {
    const Exponential<float> e(a < -Terms<float>::SILU_LIMIT ? -Terms<float>::SILU_LIMIT : a, 0.0f);
    return e.scaled(e.e);
}

// What a chunk hands on for a query: the greatest score, the sum of the weights, and the weighted sum of the values.
struct Partial {
    float *greatest, *total, *sum;

    explicit Partial(float* at) : greatest(at), total(at + 1), sum(at + ATTENTION_LANES) {}

    // This one's keys come before the other's.
    void merge(const Partial& other, int64_t dv) const {
        const float m = *greatest < *other.greatest ? *other.greatest : *greatest;
        const float own = exponential(*greatest - m), its = exponential(*other.greatest - m);
        *greatest = m, *total = *total * own + *other.total * its;
        IVDEP for (int64_t i = 0; i < dv; ++i) sum[i] = sum[i] * own + other.sum[i] * its;
    }
};

// The keys of a chunk: those of a list, or those from `first` on where there is none.
struct ChunkKeys {
    const int32_t* list;
    int64_t first;
    int64_t operator[](int64_t i) const { return list ? list[i] : first + i; }
};

// Rows of floats, `pitch` apart.
struct Floats {
    const float* data;
    int64_t pitch;
    const float* row(int64_t j) const { return data + j * pitch; }
};

// One token's queries of one key head.
class Attending {
    const Attention& a;
    const int64_t d_, dv_;
    const char *keys_, *values_;
    Buffer<float> queries_, tile_, weights_;

public:
    Attending(const Attention& a, int64_t batch, int64_t head, int64_t token)
        : a(a), d_(whole_lanes(a.d)), dv_(whole_lanes(a.dv)), keys_(at(a.k, batch, head)), values_(at(a.v, batch, head)),
          queries_(a.group * d_), tile_(KEY_TILE * (d_ > dv_ ? d_ : dv_)), weights_(a.group * ATTENTION_CHUNK) {
        for (int64_t g = 0; g < a.group; ++g) {
            const char* from = at(a.q, batch, head * a.group + g) + token * a.q.row * bytes_of(a.element);
            widen_row(from, a.d, d_, queries_.data() + g * d_);
        }
    }

    // Of n keys, at most ATTENTION_CHUNK: a partial result for each query.
    void chunk(const ChunkKeys& keys, int64_t n, float* partials) {
        score(keys, n);
        for (int64_t g = 0; g < a.group; ++g) {
            const Partial partial(partials + g * partial_floats(a.dv));
            weigh(weights_.data() + g * ATTENTION_CHUNK, n, partial);
            for (int64_t i = 0; i < dv_; ++i) partial.sum[i] = 0;
        }
        for (int64_t tile = 0; tile < n; tile += KEY_TILE) {
            const int64_t rows = least(KEY_TILE, n - tile);
            const Floats v = floats_of(a.v, values_, keys, tile, rows, a.dv);
            for (int64_t g = 0; g < a.group; ++g)
                add_values(v, weights_.data() + g * ATTENTION_CHUNK + tile, rows, partials + g * partial_floats(a.dv));
        }
    }

private:
    char* at(const HeadRows& x, int64_t batch, int64_t head) const {
        return x.data + (batch * x.batch + head * x.head) * bytes_of(a.element);
    }

    void widen_row(const char* from, int64_t n, int64_t room, float* to) const {
        widen<float>(a.element, from, 0, n, to);
        for (int64_t i = n; i < room; ++i) to[i] = 0;
    }

    // n rows from `first` on of a chunk, as floats: where they are, or widened into the tile.
    Floats floats_of(const HeadRows& x, const char* rows, const ChunkKeys& keys, int64_t first, int64_t n, int64_t width) {
        const int64_t bytes = x.row * bytes_of(a.element), room = whole_lanes(width);
        if (a.element == F32 && !keys.list && width == room && n % 4 == 0)
            return {reinterpret_cast<const float*>(rows + keys[first] * bytes), x.row};
        float* tile = tile_.data();
        for (int64_t j = 0; j < n; ++j) widen_row(rows + keys[first + j] * bytes, width, room, tile + j * room);
        for (int64_t i = n * room; i < (n + 3) / 4 * 4 * room; ++i) tile[i] = 0;  // rows are read by fours
        return {tile, room};
    }

    void score(const ChunkKeys& keys, int64_t n) {
        for (int64_t tile = 0; tile < n; tile += KEY_TILE) {
            const int64_t rows = least(KEY_TILE, n - tile);
            const Floats k = floats_of(a.k, keys_, keys, tile, rows, a.d);
            for (int64_t g = 0; g < a.group; ++g) {
                const float* q = queries_.data() + g * d_;
                float* to = weights_.data() + g * ATTENTION_CHUNK + tile;
                for (int64_t j = 0; j < rows; j += 4) {
                    Sixteen sums[4]{};
                    for (int64_t i = 0; i < d_; i += ATTENTION_LANES) {
                        const Sixteen own = Sixteen::at(q + i);
#pragma GCC unroll 4
                        for (int r = 0; r < 4; ++r) sums[r].add_product(own, Sixteen::at(k.row(j + r) + i));
                    }
                    const Four scores = halved(sums) * a.scale;
                    memcpy(to + j, &scores, sizeof scores);
                }
            }
        }
    }

    // Scores become weights.
    static void weigh(float* scores, int64_t n, const Partial& partial) {
        float m = scores[0];
        for (int64_t j = 1; j < n; ++j) m = m < scores[j] ? scores[j] : m;
        const float base = m == -__builtin_inff() ? 0 : m;  // keys of no weight at all, not of NaN
        IVDEP for (int64_t j = 0; j < n; ++j) scores[j] = exponential(scores[j] - base);
        for (int64_t j = n; j < whole_lanes(n); ++j) scores[j] = 0;
        Sixteen total[4]{};
        for (int64_t j = 0; j < n; j += ATTENTION_LANES) total[0].add(Sixteen::at(scores + j));
        *partial.greatest = m, *partial.total = halved(total)[0];
    }

    void add_values(const Floats& v, const float* weights, int64_t rows, float* partial) const {
        constexpr int64_t AT_ONCE = 4;
        float* sum = Partial(partial).sum;
        for (int64_t e = 0; e < dv_; e += AT_ONCE * ATTENTION_LANES) {
            if (e + AT_ONCE * ATTENTION_LANES <= dv_) {
                add_columns<AT_ONCE>(v, weights, rows, e, sum + e);
            } else {
                for (int64_t i = e; i < dv_; i += ATTENTION_LANES) add_columns<1>(v, weights, rows, i, sum + i);
            }
        }
    }

    template <int N>
    static void add_columns(const Floats& v, const float* weights, int64_t rows, int64_t first, float* sum) {
        Sixteen acc[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[i] = Sixteen::at(sum + i * ATTENTION_LANES);
        for (int64_t j = 0; j < rows; ++j) {
            const float* from = v.row(j) + first;
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) acc[i].add_product(weights[j], Sixteen::at(from + i * ATTENTION_LANES));
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) acc[i].store(sum + i * ATTENTION_LANES);
    }
};

inline int64_t batch_of(const Attention& a, int64_t row) { return (a.first + row) / a.tokens; }
inline int64_t token_of(const Attention& a, int64_t row) { return (a.first + row) % a.tokens; }

inline float* partials_of(const Attention& a, int64_t row, int64_t head, int64_t chunk) {
    return a.partials + ((row * a.heads + head) * a.chunks + chunk) * a.group * partial_floats(a.dv);
}

// Which keys a row attends to, in order, and how many they are.
void find_keys(const Attention& a, int64_t row) {
    const int64_t token = token_of(a, row);
    if (!a.mask) {
        a.counts[row] = a.causal ? least(token + 1, a.keys) : a.keys;
        return;
    }
    const char* mask = a.mask + batch_of(a, row) * a.mask_batch + token * a.mask_row;
    int32_t* list = a.lists + row * a.keys;
    int64_t n = 0;
    for (int64_t j = 0; j < a.keys; ++j) {
        list[n] = int32_t(j);
        n += mask[j * a.mask_key] != 0;
    }
    a.counts[row] = n;
}

// Number `item` of rows x key heads x chunks.
void attend_chunk(const Attention& a, int64_t item) {
    const int64_t chunk = item % a.chunks, head = item / a.chunks % a.heads, row = item / a.chunks / a.heads;
    const int64_t first = chunk * ATTENTION_CHUNK, n = least(a.counts[row] - first, ATTENTION_CHUNK);
    if (n <= 0) return;
    const ChunkKeys keys{a.mask ? a.lists + row * a.keys + first : nullptr, first};
    Attending(a, batch_of(a, row), head, token_of(a, row)).chunk(keys, n, partials_of(a, row, head, chunk));
}

void merge_chunks(const Attention& a, int64_t row) {
    const int64_t floats = partial_floats(a.dv), chunks = (a.counts[row] + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK, bytes = bytes_of(a.element);
    for (int64_t head = 0; head < a.heads; ++head) {
        for (int64_t g = 0; g < a.group; ++g) {
            char* to = a.out + ((a.first + row) * a.heads * a.group + head * a.group + g) * a.dv * bytes;
            if (!chunks) {
                memset(to, 0, a.dv * bytes);
                continue;
            }
            const Partial sum(partials_of(a, row, head, 0) + g * floats);
            for (int64_t c = 1; c < chunks; ++c) sum.merge(Partial(partials_of(a, row, head, c) + g * floats), a.dv);
            const float total = *sum.total;
            IVDEP for (int64_t i = 0; i < a.dv; ++i) sum.sum[i] = sum.sum[i] / total;
            put_floats<float>(a.element, sum.sum, a.dv, to);
        }
    }
}

}  // namespace
}  // namespace baracuda
