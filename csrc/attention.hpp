// Attention: softmax(q . k * scale) . v over the keys that a token attends to, in one order of summation. Included once per
// instruction set.
//
// The keys that are attended to are taken in order, ATTENTION_CHUNK at a time; those that a mask leaves out are not counted,
// so padding moves no key into another chunk. A score: 16 lanes add up every 16th product; then the upper half of the lanes
// is added to the lower until one is left. A chunk's weights are exp(score - its greatest score); their sum has lanes
// again, and values are added by rising key. Chunks are merged in order. All of it is f32, each operation rounded once.
//
// Tokens of a prompt attend to the first keys of one list and are computed together: keys and values are widened once for
// all of them, and a register has a score of each of 16 keys.
#pragma once
#include "activation.hpp"
#include "lanes.hpp"
#include "produce.hpp"

namespace baracuda {
namespace {

constexpr int64_t KEY_TILE = 32;
// Queries whose sums are in registers at once, and from how many on keys are transposed for them.
constexpr int QUERIES = REGISTER / 4;
constexpr int64_t MANY_QUERIES = 8;

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

// Tokens of one batch entry, and where they are among those at hand.
struct TokenTile {
    int64_t batch, token, tokens, number;

    TokenTile(const Attention& a, int64_t number) : number(number) {
        const int64_t tiles = (a.tokens + a.tile - 1) / a.tile;
        batch = (a.first + number) / tiles, token = (a.first + number) % tiles * a.tile;
        tokens = least(a.tile, a.tokens - token);
    }
    int64_t* counts(const Attention& a) const { return a.counts + number * a.tile; }
    int32_t* list(const Attention& a, int64_t token) const { return a.lists + (number * a.tile + token) * a.keys; }
    float* partials(const Attention& a, int64_t head, int64_t share, int64_t token) const {
        const int64_t tokens = ((number * a.heads + head) * a.shares + share) * a.tile + token;
        return a.partials + tokens * a.group * partial_floats(a.dv);
    }
};

// The sums of lanes LANE, LANE + STEP and so on of the scores of 16 keys, which are columns, for each of a few queries.
template <int STEP, int LANE = 0>
ALWAYS_INLINE void add_lanes(const float* q, const float* columns, int64_t d, Sixteen (&sums)[QUERIES]) {
    Sixteen upper[QUERIES]{};
    if constexpr (2 * STEP == ATTENTION_LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < QUERIES; ++r) sums[r] = Sixteen{};
        for (int64_t i = 0; i < d; i += ATTENTION_LANES) {
            const Sixteen low = Sixteen::at(columns + (i + LANE) * ATTENTION_LANES);
            const Sixteen high = Sixteen::at(columns + (i + LANE + STEP) * ATTENTION_LANES);
#pragma GCC unroll 4
            for (int r = 0; r < QUERIES; ++r) {
                sums[r].add_product(q[r * d + i + LANE], low);
                upper[r].add_product(q[r * d + i + LANE + STEP], high);
            }
        }
    } else {
        add_lanes<2 * STEP, LANE>(q, columns, d, sums);
        add_lanes<2 * STEP, LANE + STEP>(q, columns, d, upper);
    }
#pragma GCC unroll 4
    for (int r = 0; r < QUERIES; ++r) sums[r].add(upper[r]);
}

// The queries of some tokens that share a key head and the list of their keys.
class Attending {
    const Attention& a;
    const int64_t d_, dv_, queries_, floats_;
    const char *keys_, *values_;
    Buffer<float> query_, rows_, columns_, weights_, next_;
    Buffer<int64_t> counts_;

public:
    Attending(const Attention& a, const TokenTile& tile, int64_t head, int64_t token, int64_t tokens)
        : a(a), d_(whole_lanes(a.d)), dv_(whole_lanes(a.dv)), queries_(tokens * a.group), floats_(partial_floats(a.dv)),
          keys_(at(a.k, tile.batch, head)), values_(at(a.v, tile.batch, head)), query_(padded() * d_),
          rows_(KEY_TILE * (d_ > dv_ ? d_ : dv_)), columns_(transposes() ? ATTENTION_LANES * d_ : 0),
          weights_(padded() * ATTENTION_CHUNK), next_(queries_ * floats_), counts_(queries_) {
        for (int64_t i = 0; i < queries_; ++i) {
            const char* from = at(a.q, tile.batch, head * a.group + i % a.group);
            from += (tile.token + token + i / a.group) * a.q.row * bytes_of(a.element);
            widen_row(from, a.d, d_, query_.data() + i * d_);
        }
        for (int64_t i = queries_ * d_; i < padded() * d_; ++i) query_.data()[i] = 0;
        if (transposes()) memset(columns_.data(), 0, ATTENTION_LANES * d_ * sizeof(float));
    }

    // Chunks from `chunk` to before `end`, merged; a token attends to `counts` keys of the list, or from 0 on.
    void chunks(int64_t chunk, int64_t end, const int32_t* list, const int64_t* counts, float* partials) {
        for (bool is_first = true; chunk < end; ++chunk, is_first = false) {
            const int64_t first = chunk * ATTENTION_CHUNK;
            int64_t most = 0;
            for (int64_t i = 0; i < queries_; ++i) {
                const int64_t left = counts[i / a.group] - first, n = left < 0 ? 0 : least(left, ATTENTION_CHUNK);
                counts_.data()[i] = n, most = most < n ? n : most;
            }
            if (!most) return;
            float* to = is_first ? partials : next_.data();
            one_chunk({list ? list + first : nullptr, first}, most, to);
            for (int64_t i = 0; i < queries_ && !is_first; ++i)
                if (counts_.data()[i]) Partial(partials + i * floats_).merge(Partial(to + i * floats_), a.dv);
        }
    }

private:
    int64_t padded() const { return (queries_ + QUERIES - 1) / QUERIES * QUERIES; }
    bool transposes() const { return queries_ >= MANY_QUERIES; }
    float* weights(int64_t query) { return weights_.data() + query * ATTENTION_CHUNK; }

    const char* at(const HeadRows& x, int64_t batch, int64_t head) const {
        return x.data + (batch * x.batch + head * x.head) * bytes_of(a.element);
    }

    void widen_row(const char* from, int64_t n, int64_t room, float* to) const {
        widen<float>(a.element, from, 0, n, to);
        for (int64_t i = n; i < room; ++i) to[i] = 0;
    }

    // n rows from `first` on of a chunk, as floats: where they are, or widened.
    Floats floats_of(const HeadRows& x, const char* rows, const ChunkKeys& keys, int64_t first, int64_t n, int64_t width) {
        const int64_t bytes = x.row * bytes_of(a.element), room = whole_lanes(width);
        if (a.element == F32 && !keys.list && width == room && n % 4 == 0)
            return {reinterpret_cast<const float*>(rows + keys[first] * bytes), x.row};
        float* to = rows_.data();
        for (int64_t j = 0; j < n; ++j) widen_row(rows + keys[first + j] * bytes, width, room, to + j * room);
        for (int64_t i = n * room; i < (n + 3) / 4 * 4 * room; ++i) to[i] = 0;  // rows are read by fours
        return {to, room};
    }

    // Of n keys, at most ATTENTION_CHUNK: a partial result for each query, of the first keys that are its own.
    void one_chunk(const ChunkKeys& keys, int64_t n, float* partials) {
        for (int64_t first = 0; first < n; first += KEY_TILE) {
            const int64_t rows = least(KEY_TILE, n - first);
            const Floats k = floats_of(a.k, keys_, keys, first, rows, a.d);
            transposes() ? score_columns(k, first, rows) : score_rows(k, first, rows);
        }
        for (int64_t i = 0; i < queries_; ++i) {
            const Partial partial(partials + i * floats_);
            if (counts_.data()[i]) weigh(weights(i), counts_.data()[i], partial);
            for (int64_t e = 0; e < dv_; ++e) partial.sum[e] = 0;
        }
        for (int64_t first = 0; first < n; first += KEY_TILE) {
            const int64_t rows = least(KEY_TILE, n - first);
            const Floats v = floats_of(a.v, values_, keys, first, rows, a.dv);
            int64_t i = 0;
            for (; i + QUERIES <= queries_; i += QUERIES) add_values<QUERIES>(v, i, first, rows, partials);
            for (; i < queries_; ++i) add_values<1>(v, i, first, rows, partials);
        }
    }

    // A register has the lanes of a score.
    void score_rows(const Floats& k, int64_t first, int64_t rows) {
        for (int64_t query = 0; query < queries_; ++query) {
            const float* q = query_.data() + query * d_;
            for (int64_t j = 0; j < rows; j += 4) {
                Sixteen sums[4]{};
                for (int64_t i = 0; i < d_; i += ATTENTION_LANES) {
                    const Sixteen own = Sixteen::at(q + i);
#pragma GCC unroll 4
                    for (int r = 0; r < 4; ++r) sums[r].add_product(own, Sixteen::at(k.row(j + r) + i));
                }
                const Four scores = halved(sums) * a.scale;
                memcpy(weights(query) + first + j, &scores, sizeof scores);
            }
        }
    }

    // A register has the same lane of 16 scores.
    void score_columns(const Floats& k, int64_t first, int64_t rows) {
        float* columns = columns_.data();
        for (int64_t tile = 0; tile < rows; tile += ATTENTION_LANES) {
            for (int64_t j = 0; j < ATTENTION_LANES && tile + j < rows; j += 4)
                for (int64_t i = 0; i < d_; i += 4)
                    transpose_four(k.row(tile + j) + i, k.pitch, columns + i * ATTENTION_LANES + j, ATTENTION_LANES);
            for (int64_t query = 0; query < queries_; query += QUERIES) {
                Sixteen scores[QUERIES];
                add_lanes<1>(query_.data() + query * d_, columns, d_, scores);
#pragma GCC unroll 4
                for (int r = 0; r < QUERIES; ++r) {
                    scores[r].multiply(a.scale);
                    scores[r].store(weights(query + r) + first + tile);
                }
            }
        }
    }

    // Scores become weights.
    static void weigh(float* scores, int64_t n, const Partial& partial) {
        const int64_t room = whole_lanes(n);
        for (int64_t j = n; j < room; ++j) scores[j] = scores[0];
        Sixteen greatest = Sixteen::at(scores);
        for (int64_t j = ATTENTION_LANES; j < room; j += ATTENTION_LANES) greatest.join(Greater{}, Sixteen::at(scores + j));
        const float m = greatest.whole(Greater{});
        const float base = m == -__builtin_inff() ? 0 : m;  // keys of no weight at all, not of NaN
        IVDEP for (int64_t j = 0; j < room; ++j) scores[j] = exponential(scores[j] - base);
        for (int64_t j = n; j < room; ++j) scores[j] = 0;
        Sixteen total{};
        for (int64_t j = 0; j < room; j += ATTENTION_LANES) total.add(Sixteen::at(scores + j));
        *partial.greatest = m, *partial.total = total.whole(Sum{});
    }

    // The values of rows, from key `first` on, to the sums of N queries: what all of them attend to, then the others.
    template <int N>
    void add_values(const Floats& v, int64_t query, int64_t first, int64_t rows, float* partials) {
        int64_t own[N], all = rows;
        for (int r = 0; r < N; ++r) {
            const int64_t left = counts_.data()[query + r] - first;
            own[r] = left < 0 ? 0 : least(left, rows), all = least(all, own[r]);
        }
        float* sums = partials + query * floats_ + ATTENTION_LANES;
        const float* weight = weights(query) + first;
        add_rows<N>(v, 0, all, weight, sums);
        for (int r = 0; r < N; ++r)
            if (own[r] > all) add_rows<1>(v, all, own[r], weight + r * ATTENTION_CHUNK, sums + r * floats_);
    }

    template <int N>
    void add_rows(const Floats& v, int64_t from, int64_t to, const float* weights, float* sums) const {
        constexpr int REGISTERS = REGISTER == 16 ? 16 : 8, FIT = REGISTERS / (N * Sixteen::PARTS), AT_ONCE = FIT < 4 ? FIT : 4;
        int64_t e = 0;
        for (; e + AT_ONCE * ATTENTION_LANES <= dv_; e += AT_ONCE * ATTENTION_LANES)
            add_columns<N, AT_ONCE>(v, from, to, weights, e, sums);
        for (; e < dv_; e += ATTENTION_LANES) add_columns<N, 1>(v, from, to, weights, e, sums);
    }

    template <int N, int WIDTH>
    void add_columns(const Floats& v, int64_t from, int64_t to, const float* weights, int64_t e, float* sums) const {
        Sixteen acc[N][WIDTH];
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < WIDTH; ++i) acc[r][i] = Sixteen::at(sums + r * floats_ + e + i * ATTENTION_LANES);
        for (int64_t j = from; j < to; ++j) {
            Sixteen value[WIDTH];
#pragma GCC unroll 4
            for (int i = 0; i < WIDTH; ++i) value[i] = Sixteen::at(v.row(j) + e + i * ATTENTION_LANES);
#pragma GCC unroll 4
            for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
                for (int i = 0; i < WIDTH; ++i) acc[r][i].add_product(weights[r * ATTENTION_CHUNK + j], value[i]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < WIDTH; ++i) acc[r][i].store(sums + r * floats_ + e + i * ATTENTION_LANES);
    }
};

inline int64_t chunks_of(int64_t keys) { return (keys + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK; }

// Which keys the tokens of a tile attend to, in order, and how many they are.
void find_keys(const Attention& a, int64_t number) {
    const TokenTile tile(a, number);
    int64_t* counts = tile.counts(a);
    a.apart[number] = false;
    int64_t longest = 0;
    for (int64_t i = 0; i < tile.tokens; ++i) {
        const int64_t token = tile.token + i;
        if (!a.mask) {
            counts[i] = a.causal ? least(token + 1, a.keys) : a.keys;
            continue;
        }
        const char* mask = a.mask + tile.batch * a.mask_batch + token * a.mask_row;
        int32_t* list = tile.list(a, i);
        int64_t n = 0;
        for (int64_t j = 0; j < a.keys; ++j) {
            list[n] = int32_t(j);
            n += mask[j * a.mask_key] != 0;
        }
        counts[i] = n;
        if (n > counts[longest]) longest = i;
    }
    for (int64_t i = 0; i < tile.tokens && a.mask; ++i)
        if (memcmp(tile.list(a, i), tile.list(a, longest), counts[i] * sizeof(int32_t))) a.apart[number] = true;
    if (a.mask && !a.apart[number] && longest) memcpy(tile.list(a, 0), tile.list(a, longest), counts[longest] * sizeof(int32_t));
}

// Number `item` of tiles x key heads x shares.
void attend_share(const Attention& a, int64_t item) {
    const int64_t share = item % a.shares, head = item / a.shares % a.heads;
    const TokenTile tile(a, item / a.shares / a.heads);
    const int64_t* counts = tile.counts(a);
    const int64_t first = a.shares == 1 ? 0 : share, end = a.shares == 1 ? chunks_of(a.keys) : share + 1;
    const int64_t together = a.apart[tile.number] ? 1 : tile.tokens;
    int64_t most = 0;
    for (int64_t i = 0; i < tile.tokens; ++i) most = most < counts[i] ? counts[i] : most;
    if (most <= first * ATTENTION_CHUNK) return;
    for (int64_t i = 0; i < tile.tokens; i += together)
        Attending(a, tile, head, i, together)
            .chunks(first, end, a.mask ? tile.list(a, i) : nullptr, counts + i, tile.partials(a, head, share, i));
}

void merge_shares(const Attention& a, int64_t number) {
    const TokenTile tile(a, number);
    const int64_t floats = partial_floats(a.dv), bytes = bytes_of(a.element);
    for (int64_t i = 0; i < tile.tokens; ++i) {
        const int64_t chunks = chunks_of(tile.counts(a)[i]), shares = a.shares == 1 ? least(chunks, 1) : chunks;
        char* out = a.out + (tile.batch * a.tokens + tile.token + i) * a.heads * a.group * a.dv * bytes;
        for (int64_t query = 0; query < a.heads * a.group; ++query, out += a.dv * bytes) {
            if (!shares) {
                memset(out, 0, a.dv * bytes);
                continue;
            }
            const int64_t head = query / a.group, at = query % a.group * floats;
            const Partial sum(tile.partials(a, head, 0, i) + at);
            for (int64_t s = 1; s < shares; ++s) sum.merge(Partial(tile.partials(a, head, s, i) + at), a.dv);
            const float total = *sum.total;
            IVDEP for (int64_t e = 0; e < a.dv; ++e) sum.sum[e] = sum.sum[e] / total;
            put_floats<float>(a.element, sum.sum, a.dv, out);
        }
    }
}

}  // namespace
}  // namespace baracuda
