// baracuda._cpu.gram: x.T @ x of a chunk of tokens in bf16, summed in f32, for the second moments that GPTQ reads.
#include "checks.hpp"
#include "module.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace baracuda {
namespace {

// Columns of a panel, three vectors, and how many rows of a product are summed in registers at a time.
constexpr int64_t PANEL = 48, ROWS = 8;

bool has_gram() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

#if defined(__x86_64__)
// Two tokens of a column lie side by side, as the instruction reads them; panel by panel, zeros behind the last column.
void pack(const uint16_t* x, int64_t tokens, int64_t columns, uint16_t* packed) {
    const int64_t pairs = (tokens + 1) / 2;
    for (int64_t first = 0; first < columns; first += PANEL) {
        const int64_t n = columns - first < PANEL ? columns - first : PANEL;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const uint16_t* even = x + 2 * pair * columns + first;
            const uint16_t* odd = 2 * pair + 1 < tokens ? even + columns : nullptr;
            uint16_t* to = packed + (first * pairs + pair * PANEL) * 2;
            for (int64_t i = 0; i < n; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd ? odd[i] : 0;
            for (int64_t i = n; i < PANEL; ++i) to[2 * i] = to[2 * i + 1] = 0;
        }
    }
}

// ROWS columns of one panel times the columns of another, over all tokens in order.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) void tile(const uint16_t* rows, const uint16_t* columns,
                                                                           int64_t pairs, float* out) {
    __m512 sum[ROWS][3];
    for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t c = 0; c < 3; ++c) sum[r][c] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const auto* at = reinterpret_cast<const int*>(rows + pair * PANEL * 2);
        const uint16_t* with = columns + pair * PANEL * 2;
        const auto c0 = (__m512bh)_mm512_loadu_si512(with), c1 = (__m512bh)_mm512_loadu_si512(with + 32),
                   c2 = (__m512bh)_mm512_loadu_si512(with + 64);
        for (int64_t r = 0; r < ROWS; ++r) {
            const auto own = (__m512bh)_mm512_set1_epi32(at[r]);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], own, c0);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], own, c1);
            sum[r][2] = _mm512_dpbf16_ps(sum[r][2], own, c2);
        }
    }
    for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t c = 0; c < 3; ++c) _mm512_storeu_ps(out + r * PANEL + 16 * c, sum[r][c]);
}

// Panels on and below the diagonal; what lies above them is left as it is.
void multiply(const uint16_t* packed, int64_t tokens, int64_t columns, float* product) {
    const int64_t pairs = (tokens + 1) / 2;
    float out[ROWS * PANEL];
    for (int64_t left = 0; left < columns; left += PANEL) {
        const int64_t n = columns - left < PANEL ? columns - left : PANEL;
        for (int64_t top = left; top < columns; top += ROWS) {
            const int64_t panel = top / PANEL * PANEL;
            tile(packed + (panel * pairs + top - panel) * 2, packed + left * pairs * 2, pairs, out);
            const int64_t rows = columns - top < ROWS ? columns - top : ROWS;
            for (int64_t r = 0; r < rows; ++r) memcpy(product + (top + r) * columns + left, out + r * PANEL, n * sizeof(float));
        }
    }
}
#endif

void gram(int64_t tokens, int64_t columns, uint64_t x, uint64_t packed, int64_t room, uint64_t made) {
    const int64_t panels = (columns + PANEL - 1) / PANEL;
    require(has_gram(), "a processor with AVX512-BF16");
    require(room >= product(product(panels, PANEL), tokens + 1), "room for the packed tokens");
    const auto* from = reinterpret_cast<const uint16_t*>(checked(x, product(tokens, columns), "x"));
    auto* scratch = reinterpret_cast<uint16_t*>(checked(packed, room, "packed"));
    auto* to = reinterpret_cast<float*>(checked(made, product(columns, columns), "product"));
    nb::gil_scoped_release released;
#if defined(__x86_64__)
    pack(from, tokens, columns, scratch);
    multiply(scratch, tokens, columns, to);
#endif
}

}  // namespace

void bind_gram(nb::module_& m) {
    m.def("gram", &gram);
    m.def("has_gram", &has_gram);
}

}  // namespace baracuda
