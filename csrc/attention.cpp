// baracuda._cpu.attend: attention with one order of summation.
#include "module.hpp"
#include "operands.hpp"

namespace nb = nanobind;

namespace baracuda {
namespace {

// Bytes of partial results, roughly: tokens are taken in blocks.
constexpr int64_t BLOCK_ROOM = 4 << 20;

// [batch, heads, rows, d] with dense rows.
HeadRows head_rows(const Operand& x, int element) {
    const DLTensor& t = x.tensor;
    require(x.is_tensor && t.ndim == 4 && x.code == element, "tensors of one float type and four axes");
    require(t.shape[3] == 1 || t.strides[3] == 1, "rows without gaps");
    return {reinterpret_cast<char*>(x.address), t.strides[0], t.strides[1], t.strides[2]};
}

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// operands: query [batch, heads * group, tokens, d], key [batch, heads, keys, d], value [batch, heads, keys, dv], a mask
// of bools [1 or batch, 1, 1 or tokens, keys] or None, and the output [batch, tokens, heads * group, dv], dense.
void attend(nb::handle given, bool causal, float scale) {
    const Operands operands(given, 5);
    const Operand q = operands[0], k = operands[1], v = operands[2], mask = operands[3], out = operands[4];
    Attention a{};
    a.element = q.code, a.causal = causal, a.scale = scale;
    require(a.element == F16 || a.element == BF16 || a.element == F32, "f16, bf16 or f32");
    a.q = head_rows(q, a.element), a.k = head_rows(k, a.element), a.v = head_rows(v, a.element);
    const HeadRows made = head_rows(out, a.element);
    const int64_t *qs = q.tensor.shape, *ks = k.tensor.shape, *vs = v.tensor.shape, *os = out.tensor.shape;
    const int64_t batch = qs[0];
    a.tokens = qs[2], a.heads = ks[1], a.keys = ks[2], a.d = qs[3], a.dv = vs[3];
    require(a.heads > 0 && qs[1] % a.heads == 0 && qs[1] > 0, "a whole number of queries for each head of keys");
    require(ks[0] == batch && vs[0] == batch && vs[1] == a.heads && ks[3] == a.d && vs[2] == a.keys, "keys and values that fit");
    require(a.d > 0 && a.dv > 0, "rows that are not empty");
    require(a.keys <= INT32_MAX, "fewer than 2**31 keys");
    require(os[0] == batch && os[1] == a.tokens && os[2] == qs[1] && os[3] == a.dv && out.pitch == DENSE, "a dense output");
    a.group = qs[1] / a.heads, a.out = made.data;
    if (mask) {
        const DLTensor& m = mask.tensor;
        require(mask.is_tensor && m.ndim == 4 && word(m.dtype) == word({6, 8, 1}) && m.shape[1] == 1 &&
                    m.shape[3] == a.keys && (m.shape[0] == 1 || m.shape[0] == batch) &&
                    (m.shape[2] == 1 || m.shape[2] == a.tokens),
                "a mask of bools [batch, 1, tokens, keys]");
        a.mask = reinterpret_cast<const char*>(mask.address), a.mask_key = m.strides[3];
        a.mask_batch = m.shape[0] == 1 ? 0 : m.strides[0], a.mask_row = m.shape[2] == 1 ? 0 : m.strides[2];
    }
    const int64_t rows = product(batch, a.tokens), queries = product(rows, qs[1]);
    if (!rows) return;
    const int64_t most = !a.mask && causal && a.tokens < a.keys ? a.tokens : a.keys;
    a.chunks = most ? (most + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK : 1;
    const int64_t counts = 64, list = a.mask ? aligned(a.keys * 4) : 0;
    const int64_t partials = product(product(qs[1], a.chunks), partial_floats(a.dv) * 4);
    const int64_t of_row = counts + list + partials, fit = BLOCK_ROOM / of_row;
    const int64_t block = fit < 1 ? 1 : fit < rows ? fit : rows;
    char* room = reinterpret_cast<char*>(workspace_of(nb::none(), block * of_row));
    a.counts = reinterpret_cast<int64_t*>(room);
    a.lists = reinterpret_cast<int32_t*>(room + block * counts);
    a.partials = reinterpret_cast<float*>(room + block * (counts + list));
    const int64_t threads = threads_for(product(queries, product(a.keys, a.d + a.dv)) / 4);
    nb::gil_scoped_release released;
    for (a.first = 0; a.first < rows; a.first += block) {
        const int64_t here = block < rows - a.first ? block : rows - a.first;
        auto find = [&](int64_t row, int64_t) { isa->kernels->find_keys(a, row); };
        auto attend = [&](int64_t item, int64_t) { isa->kernels->attend_chunk(a, item); };
        auto merge = [&](int64_t row, int64_t) { isa->kernels->merge_chunks(a, row); };
        share_out(a.mask ? threads : 1, here, find);
        share_out(threads, here * a.heads * a.chunks, attend);
        share_out(here > 1 ? threads : 1, here, merge);
    }
}

}  // namespace

void bind_attention(nb::module_& m) { m.def("attend", &attend); }

}  // namespace baracuda
