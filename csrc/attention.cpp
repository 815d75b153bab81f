// baracuda._cpu.attend: attention with one order of summation.
#include "module.hpp"
#include "operands.hpp"

namespace nb = nanobind;

namespace baracuda {
namespace {

// Tiles are taken in lots of about as many bytes, and have about as many queries of one key head.
constexpr int64_t LOT_ROOM = 4 << 20, TILE_QUERIES = 96;

// [batch, heads, rows, d] with dense rows.
HeadRows head_rows(const Operand& x, int element) {
    const DLTensor& t = x.tensor;
    require(x.is_tensor && t.ndim == 4 && x.code == element, "tensors of one float type and four axes");
    require(t.shape[3] == 1 || t.strides[3] == 1, "rows without gaps");
    return {reinterpret_cast<char*>(x.address), t.strides[0], t.strides[1], t.strides[2]};
}

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t within(int64_t low, int64_t x, int64_t high) { return x > high ? high : x < low ? low : x; }
int64_t tiles_of(const Attention& a) { return (a.tokens + a.tile - 1) / a.tile; }

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
    const int64_t threads = threads_for(product(queries, product(most, a.d + a.dv)) / 4);
    const int64_t token_room = product(qs[1], partial_floats(a.dv) * 4);
    a.tile = within(1, TILE_QUERIES / a.group, a.tokens);
    a.shares = 1;
    if (product(batch * tiles_of(a), a.heads) < 4 * threads) {
        a.shares = within(1, (most + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK, INT64_MAX);
        a.tile = within(1, LOT_ROOM / product(token_room, a.shares), a.tile);
    }
    const int64_t tiles = batch * tiles_of(a), counts = aligned(a.tile * 8), list = a.mask ? aligned(a.tile * a.keys * 4) : 0;
    const int64_t of_tile = 64 + counts + list + product(product(token_room, a.shares), a.tile);
    const int64_t lot = within(1, LOT_ROOM / of_tile, tiles);
    char* room = reinterpret_cast<char*>(workspace_of(nb::none(), lot * of_tile));
    a.apart = reinterpret_cast<bool*>(room);
    a.counts = reinterpret_cast<int64_t*>(room + lot * 64);
    a.lists = reinterpret_cast<int32_t*>(room + lot * (64 + counts));
    a.partials = reinterpret_cast<float*>(room + lot * (64 + counts + list));
    nb::gil_scoped_release released;
    for (a.first = 0; a.first < tiles; a.first += lot) {
        const int64_t here = lot < tiles - a.first ? lot : tiles - a.first;
        auto find = [&](int64_t tile, int64_t) { isa->kernels->find_keys(a, tile); };
        auto attend = [&](int64_t item, int64_t) { isa->kernels->attend_share(a, item); };
        auto merge = [&](int64_t tile, int64_t) { isa->kernels->merge_shares(a, tile); };
        share_out(a.mask ? threads : 1, here, find);
        share_out(threads, here * a.heads * a.shares, attend);
        share_out(here > 1 ? threads : 1, here, merge);
    }
}

}  // namespace

void bind_attention(nb::module_& m) { m.def("attend", &attend); }

}  // namespace baracuda
