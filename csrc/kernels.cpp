// Compiled once per instruction set, with BARACUDA_TABLE naming the table it defines. Everything but that table is
// local: code for one instruction set must never be picked by the linker for another.
#include <type_traits>

#include "learned.hpp"
#include "linear.hpp"
#include "ranges.hpp"

namespace baracuda {
namespace {

void elementwise(const Job& job, int64_t part, int64_t parts) {
    const bool dynamic = job.p.op >= DYNAMIC_QUANTIZE;
    const Job step = dynamic ? quantize_step(job) : job;
    by_element(job.p.element, [&](auto m, auto x) { walk<decltype(m), decltype(x)>(step, part, parts, dynamic); });
}

void fused_range(const Job& job, int64_t part, int64_t parts) {
    by_element(job.p.element, [&](auto m, auto x) { fused<decltype(m), decltype(x)>(job, part, parts); });
}

void reduce(const Job& job, int64_t part, int64_t parts) {
    if (job.p.element == F64) return reduce_share<double>(job, part, parts);
    reduce_share<float>(job, part, parts);
}

void finish(const Job& job, int64_t part, int64_t parts) {
    const Range r = share(job.p.view.segments(), part, parts);
    if (job.p.element == F64) return finish_segments<double>(job, r.first, r.last, shared_keys(job));
    finish_segments<float>(job, r.first, r.last, shared_keys(job));
}

void learned(const Job& job, int64_t part, int64_t parts) {
    by_element(job.p.element, [&](auto m, auto x) { learn_share<decltype(m), decltype(x)>(job, part, parts); });
}

void total(const Job& job, int64_t part, int64_t parts) {
    if (job.p.element == F64) return total_share<double>(job, part, parts);
    total_share<float>(job, part, parts);
}

}  // namespace

extern const Kernels BARACUDA_TABLE;
const Kernels BARACUDA_TABLE = {BARACUDA_ISA, elementwise, fused_range, reduce,     finish,   learned,
                                total,        weight_sums, unpack_rows, shift_rows, epilogue, small_linear};

}  // namespace baracuda
