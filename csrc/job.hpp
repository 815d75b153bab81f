// What one call computes, in integers and pointers: the only language the kernels and the module share.
#pragma once
#include <cstdint>

// Every instruction set compiles this header: a function of it that was not inlined could be the wrong set's copy.
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace baracuda {

enum Op : int {
    QUANTIZE,
    DEQUANTIZE,
    FAKE_QUANTIZE,
    QUANTIZE_BACKWARD,
    DEQUANTIZE_BACKWARD,
    FAKE_QUANTIZE_BACKWARD,
    FAKE_QUANTIZE_LEARNED_BACKWARD,
    DYNAMIC_QUANTIZE,
    CHOOSE_QPARAMS,
    DYNAMIC_FAKE_QUANTIZE,
    OP_COUNT
};

enum Activation : int { NONE, RELU, GELU, SILU, ACTIVATION_COUNT };

enum NormStyle : int { LLAMA, GEMMA, TORCH, LAYER, STYLE_COUNT };

enum Element : int { F16, BF16, F32, F64, S8, U8, S4, U4, ELEMENT_COUNT };

ALWAYS_INLINE bool is_packed(int element) { return element >= S4; }
ALWAYS_INLINE int64_t packed(int64_t n) { return (n + 1) / 2; }
ALWAYS_INLINE int64_t bytes_of(int element) { return element == F64 ? 8 : element == F32 ? 4 : element <= BF16 ? 2 : 1; }

constexpr int32_t MAX_ZERO_POINT = (1 << 24) - 256;
// The most segments whose range one thread finds at a time, their keys on its stack.
constexpr int64_t BLOCK_SEGMENTS = 1024;
// What stays in a core's cache between two passes, twice: one block is read again while the next is fetched.
constexpr int64_t BLOCK_BYTES = 256 << 10;

// A contiguous tensor seen as [repeat, rows, run, inner]; its scales are [rows, inner].
struct View {
    int64_t repeat, rows, run, inner;
    ALWAYS_INLINE int64_t segments() const { return rows * inner; }
    ALWAYS_INLINE int64_t segment_length() const { return repeat * run; }
    ALWAYS_INLINE int64_t numel() const { return segments() * segment_length(); }
};

// Neighbours of strided segments that are taken together: so many that whole ones stay in the cache, but never so few
// that lines are read in crumbs.
ALWAYS_INLINE int64_t block_columns(const View& v, int64_t bytes) {
    const int64_t most = 4096 / (bytes < 4 ? 4 : bytes), fit = BLOCK_BYTES / bytes / (v.run > 0 ? v.run : 1);
    const int64_t wanted = fit < 64 ? 64 : fit < most ? fit / 64 * 64 : most;
    const int64_t columns = v.inner < wanted ? v.inner : wanted;
    return columns > 0 ? columns : 1;
}

// The one order of a sum over a segment, whoever computes it. Each run is cut into blocks; a lane adds up every
// sum_lanes-th element of its block, from zero and in order, SUM_STEPS of them; then lanes are halved until one is left.
// The sums of a segment's blocks, in memory order, are added up in the same way as one block with SUM_LANES lanes.
constexpr int64_t SUM_LANES = 1024, LEAST_SUM_LANES = 8, SUM_STEPS = 8;

ALWAYS_INLINE int64_t power_of_two(int64_t n) {
    int64_t power = 1;
    while (power < n) power *= 2;
    return power;
}

ALWAYS_INLINE int64_t sum_lanes(const View& v) {
    const int64_t beside = v.inner < SUM_LANES ? power_of_two(v.inner) : SUM_LANES;
    return beside > SUM_LANES / LEAST_SUM_LANES ? LEAST_SUM_LANES : SUM_LANES / beside;
}

ALWAYS_INLINE int64_t sum_blocks(const View& v) {
    const int64_t size = sum_lanes(v) * SUM_STEPS;
    return (v.run + size - 1) / size;
}

ALWAYS_INLINE int64_t sum_units(const View& v) { return v.repeat * sum_blocks(v); }

struct Problem {
    int op, element, quantized, scale_element;
    int q_min, q_max;
    bool asymmetric, include_zero, reciprocal;
    View view;
    int64_t last;  // the length of the last axis: 4-bit pairs and row strides follow it
};

// A tensor whose rows of `length` elements begin `pitch` storage units apart (a unit is a byte for 4-bit elements).
struct Rows {
    char* data = nullptr;
    int64_t length = 1, pitch = 1;
    bool dense = true;
};

struct Job {
    Problem p;
    Rows x, dy, out;
    Rows scale, zero_point;  // no data: the numbers below stand for every segment
    int scale_code = F32;
    double scale_number = 1;
    int32_t zero_point_number = 0;
    void* scale_out = nullptr;
    int32_t* zero_point_out = nullptr;
    int64_t* keys = nullptr;  // two-phase ranges: the largest key of each segment, then the least ones
    void *grad_scale = nullptr, *grad_zero_point = nullptr;  // in the math type
    double* sums = nullptr;   // learned: of each block, [units, segments], then as many of what was clamped away
    bool stream = false;      // the output is too large to be worth a place in the cache
};

// Where the sums of a linear go: out[m, n] = T(act((f(acc) * scale_a[m]) * scale_w[n] + bias[n]) + residual[m, n]).
struct Epilogue {
    int64_t m, n, k;
    int element, activation;
    char* out;
    const void *scale_a, *scale_w, *bias;  // scale_a: m of them, or none and the number
    int scale_a_code, scale_w_code, bias_code;
    double scale_a_number, scale_w_number;
    const int32_t* zero_point;  // m of them, or none and the number
    int32_t zero_point_number;
    int32_t shift;              // how far the activations were moved before they were multiplied
    const int32_t* weight_sum;  // read only where shift or a zero point asks for it
    const char* residual;       // of the output's element, or none; its rows are `residual_pitch` elements apart
    int64_t residual_pitch;
};

// The operands of a linear's product. An s4 weight may come in groups of `group` elements along k, each of which is
// multiplied with an integer factor in 1..15: factor[n, k / group], of which the low four bits count.
struct Dot {
    const char* a;
    bool a_unsigned;
    int64_t a_pitch;
    const char* w;
    bool w_packed;
    int64_t w_pitch;
    const uint8_t* factor;
    int64_t group, factor_pitch;
    char* prepared;  // the activations as the product wants them: prepared_bytes of them, from a multiple of 64 on
};

// The operands of a linear of float activations and integer weights; one scale and zero point for `group` weights.
struct FloatWeights {
    const char* x;
    int64_t x_pitch;
    const char* w;
    int weight;  // S8, S4 or U4
    int64_t w_pitch;
    const void* scale;
    int scale_code;
    int64_t scale_pitch;
    const int32_t* zero_point;  // or none
    int64_t zero_point_pitch;
    int64_t group;   // not 0; at least k where a row has one
    char* prepared;  // the activations in the math type, rows padded to a multiple of 32
};

// A norm of rows, or a product with what a nonlinearity makes of a gate; its results may be quantized.
struct Production {
    bool gated, quantizes;
    int64_t rows, d;
    int element, style, activation;
    double eps;
    Rows x, other;  // the input and what is added to it, or the gate and what it is multiplied with
    const void *weight, *bias;  // of a norm: d of each, or none
    int weight_code, bias_code;
    char* sum_out;     // or none: nothing is added
    char* out;         // of floats
    Job quantization;  // of all rows: its input is what is made here
};

// Columns of a weight in f32, column by column: [count, rows]. Each is rounded, and hands on what the later ones make up for.
struct Columns {
    int64_t count, rows, pitch;
    float low, high;
    const float* values;    // what is rounded
    const float* factor;    // [count, count], rows `pitch` apart: what column j takes of what i hands on is at i, j
    const float* scale;     // [groups, rows]
    const int64_t* groups;  // the group of each column
    float* integers;
    float* passed;          // what each column hands on: its error over its own factor
};

// The keys whose weights are found together, and the lanes of a score's sum: part of the result of attention.
constexpr int64_t ATTENTION_CHUNK = 128, ATTENTION_LANES = 16;

ALWAYS_INLINE int64_t whole_lanes(int64_t d) { return (d + ATTENTION_LANES - 1) / ATTENTION_LANES * ATTENTION_LANES; }
// Of what a chunk hands on for one query: the greatest score, the sum of the weights, the weighted values.
ALWAYS_INLINE int64_t partial_floats(int64_t dv) { return ATTENTION_LANES + whole_lanes(dv); }

// [batch, heads, rows, d], its rows dense; the others are distances in elements.
struct HeadRows {
    char* data;
    int64_t batch, head, row;
};

// Attention of tokens. `tile` tokens of one batch entry are computed together, from tile number `first` on; `group` queries
// share a key head. Where tiles are few, threads share out their chunks of keys; otherwise a tile's are taken in turn.
struct Attention {
    int element;
    int64_t tokens, heads, group, keys, d, dv;  // heads are those of the keys
    HeadRows q, k, v;
    const char* mask;  // one byte a key, not 0 where it is attended to; or none
    int64_t mask_batch, mask_row, mask_key;
    bool causal;       // without a mask: token t attends to the keys 0 to t, not to all
    float scale;
    char* out;         // [batch, tokens, heads * group, dv]
    int64_t tile, first;
    int64_t shares;    // of a tile's keys: one for each chunk, or one
    int32_t* lists;    // [tiles, tile, keys] where there is a mask: the keys of each token
    int64_t* counts;   // [tiles, tile]: how many they are
    bool* apart;       // [tiles]: the tokens' keys are not the first ones of one list
    float* partials;   // [tiles, heads, shares, tile, group, partial_floats(dv)]
};

// One instruction set's compilation of the kernels. `part` of `parts` is one thread's share.
struct Kernels {
    void (*elementwise)(const Job&, int64_t part, int64_t parts);
    void (*fused_range)(const Job&, int64_t part, int64_t parts);
    void (*reduce)(const Job&, int64_t part, int64_t parts);
    void (*finish)(const Job&, int64_t part, int64_t parts);
    void (*learn)(const Job&, int64_t part, int64_t parts);
    void (*total)(const Job&, int64_t part, int64_t parts);
    void (*produce)(const Production&, int64_t part, int64_t parts);
    void (*round_columns)(const Columns&);
    void (*find_keys)(const Attention&, int64_t tile);
    void (*attend_share)(const Attention&, int64_t item);
    void (*merge_shares)(const Attention&, int64_t tile);
};

// The widest vector, in bytes, that prepared activations are padded for.
constexpr int64_t WIDEST = 64;

// Enough for every instruction set: 16-bit activations; or 8-bit ones and a row of ones, rows padded to whole vectors, with
// the sums of each row and of its groups, and where the groups of a vector are found.
ALWAYS_INLINE int64_t prepared_bytes(int64_t m, int64_t k) {
    const int64_t row = (k + 2 * WIDEST - 1) / (2 * WIDEST) * (2 * WIDEST);
    return (m + 1) * row * 2 + (m * 4 + WIDEST - 1) / WIDEST * WIDEST;
}

struct LinearKernels {
    void (*weight_sums)(const Dot&, int64_t n, int64_t k, int32_t* sums, int64_t part, int64_t parts);
    void (*unpack)(const Dot&, int64_t n, int64_t k, int8_t* out, int64_t part, int64_t parts);
    void (*shift)(const Dot&, int64_t m, int64_t k, int8_t* out, int64_t part, int64_t parts);
    void (*epilogue)(const Epilogue&, const int32_t* acc, int64_t part, int64_t parts);
    void (*prepare)(const Epilogue&, const Dot&);
    void (*multiply)(const Epilogue&, const Dot&, int64_t part, int64_t parts);
    void (*prepare_floats)(const Epilogue&, const FloatWeights&);
    void (*multiply_floats)(const Epilogue&, const FloatWeights&, int64_t part, int64_t parts);
};

}  // namespace baracuda
