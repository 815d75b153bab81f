// Compiled once per instruction set, with BARACUDA_TABLE naming the table it defines. Everything but that table is
// local: code for one instruction set must never be picked by the linker for another.
#include <type_traits>

#include "attention.hpp"
#include "columns.hpp"
#include "learned.hpp"

namespace baracuda {
namespace {

// Where any size is 0 nothing is read and no element is written: the loops behind these functions count on sizes that are
// not 0. What remains is one value for each empty segment: its scale and zero point, or its gradients.
bool is_empty(const Job& job) { return job.p.view.numel() == 0; }

void elementwise(const Job& job, int64_t part, int64_t parts) {
    if (is_empty(job)) return;
    const bool dynamic = job.p.op >= DYNAMIC_QUANTIZE;
    const Job step = dynamic ? quantize_step(job) : job;
    by_element(job.p.element, [&](auto m, auto x) { walk<decltype(m), decltype(x)>(step, part, parts, dynamic); });
}

void finish(const Job& job, int64_t part, int64_t parts) {
    const Range r = share(job.p.view.segments(), part, parts);
    if (job.p.element == F64) return finish_segments<double>(job, r.first, r.last, shared_keys(job));
    finish_segments<float>(job, r.first, r.last, shared_keys(job));
}

void fused_range(const Job& job, int64_t part, int64_t parts) {
    if (is_empty(job)) return finish(job, part, parts);
    by_element(job.p.element, [&](auto m, auto x) { fused<decltype(m), decltype(x)>(job, part, parts); });
}

void reduce(const Job& job, int64_t part, int64_t parts) {
    if (is_empty(job)) return;
    if (job.p.element == F64) return reduce_share<double>(job, part, parts);
    reduce_share<float>(job, part, parts);
}

void learned(const Job& job, int64_t part, int64_t parts) {
    if (is_empty(job)) {
        const int64_t bytes = job.p.element == F64 ? 8 : 4;
        const Range r = share(job.p.view.segments(), part, parts);
        if (r.first == r.last) return;
        memset(static_cast<char*>(job.grad_scale) + r.first * bytes, 0, (r.last - r.first) * bytes);
        memset(static_cast<char*>(job.grad_zero_point) + r.first * bytes, 0, (r.last - r.first) * bytes);
        return;
    }
    by_element(job.p.element, [&](auto m, auto x) { learn_share<decltype(m), decltype(x)>(job, part, parts); });
}

void total(const Job& job, int64_t part, int64_t parts) {
    if (is_empty(job)) return;
    if (job.p.element == F64) return total_share<double>(job, part, parts);
    total_share<float>(job, part, parts);
}

}  // namespace

extern const Kernels BARACUDA_TABLE;
const Kernels BARACUDA_TABLE = {elementwise, fused_range,   reduce,    finish,       learned,     total,
                                produce,     round_columns, find_keys, attend_share, merge_shares};

}  // namespace baracuda
