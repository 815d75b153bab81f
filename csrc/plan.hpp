// A plan of an elementwise or dynamic operation: a problem in integers, run over addresses.
#pragma once
#include <cmath>
#include <cstdlib>

#include "checks.hpp"
#include "module.hpp"

namespace baracuda {

constexpr int64_t STREAM = 8 << 20;  // bytes: a larger output would push out what the cache holds
// Of 4-bit integers that become floats. What multiplies them next reads each part on another core than the one that wrote
// it, and finds it sooner in memory than in that core's cache.
constexpr int64_t STREAM_WEIGHT = 1 << 20;
constexpr int64_t NEAR = 2 << 20;    // bytes of whole segments that a second pass still finds in a cache
constexpr int64_t MANY_BLOCKS = 16;  // enough for threads to have whole ones

inline bool fits(int element, int q_min, int q_max) {
    const int low = element == S8 ? -128 : element == S4 ? -8 : 0;
    const int high = element == S8 ? 127 : element == U8 ? 255 : element == S4 ? 7 : 15;
    return low <= q_min && q_min <= q_max && q_max <= high;
}

class Plan {
    Problem p_;
    int64_t numel_, segments_, scale_length_;
    bool fused_, stream_;

public:
    Plan(int op, int element, int quantized, int scale_element, int q_min, int q_max, bool asymmetric,
         bool include_zero, bool reciprocal, int64_t repeat, int64_t rows, int64_t run, int64_t inner, int64_t last,
         int64_t scale_length) {
        require(op >= 0 && op < OP_COUNT, "an operation code");
        require(element >= F16 && element <= F64, "a float element code");
        require(quantized >= S8 && quantized < ELEMENT_COUNT, "an integer element code");
        require(scale_element >= F16 && scale_element <= F64, "a float code for the scale");
        require(scale_element == element || (scale_element == F32 && element != F64), "a scale as wide as its input or f32");
        require(fits(quantized, q_min, q_max), "q_min <= q_max inside the integer element's range");
        const bool dynamic = op >= DYNAMIC_QUANTIZE;
        require(!dynamic || (asymmetric ? q_min < q_max : q_max > 0), "a range to divide by");
        require(repeat >= 0 && rows >= 0 && run >= 0 && inner >= 0 && last >= 0, "sizes that are not negative");
        require(inner <= 1 || repeat == 1 || repeat * rows * run == 0, "a canonical view");
        segments_ = product(rows, inner);
        numel_ = product(product(product(repeat, rows), run), inner);
        require(last > 0 ? numel_ % last == 0 : numel_ == 0, "a last axis that divides the tensor");
        require(inner <= 1 || numel_ == 0 || inner % last == 0, "strided segments that span whole rows");
        require(scale_length >= 0 && (scale_length == 0 || segments_ % scale_length == 0), "whole rows of scales");
        scale_length_ = scale_length;
        p_ = {op,         element,      quantized,  scale_element,               q_min, q_max,
              asymmetric, include_zero, reciprocal, {repeat, rows, run, inner}, last};
        fused_ = dynamic && in_cache();
        const bool integers = op == QUANTIZE || op == DYNAMIC_QUANTIZE;
        const int64_t limit = op == DEQUANTIZE && is_packed(quantized) ? STREAM_WEIGHT : STREAM;
        stream_ = op != CHOOSE_QPARAMS && numel_ * (integers ? 1 : bytes_of(element)) >= limit;
    }

    // Bytes: the keys of every segment, where they are too many or too long-lived for a stack; the sums of its blocks.
    int64_t workspace() const {
        if (p_.op == FAKE_QUANTIZE_LEARNED_BACKWARD) {
            const int64_t units = sum_units(p_.view);
            return units > 1 ? product(product(units, segments_), 16) : 0;
        }
        const bool dynamic = p_.op >= DYNAMIC_QUANTIZE;
        return dynamic && !fused_ ? segments_ * 8 * (p_.asymmetric ? 2 : 1) : 0;
    }

    void run(uint64_t x, int64_t x_pitch, uint64_t dy, int64_t dy_pitch, uint64_t scale, int scale_code,
             int64_t scale_pitch, double scale_number, uint64_t zero_point, int64_t zero_point_pitch,
             int64_t zero_point_number, uint64_t out, int64_t threads) const {
        require(p_.op < FAKE_QUANTIZE_LEARNED_BACKWARD, "a plan with given scales and one output");
        threads = checked_threads(threads, numel_);
        const Job job = given(x, x_pitch, dy, dy_pitch, scale, scale_code, scale_pitch, scale_number, zero_point,
                              zero_point_pitch, zero_point_number, out);
        auto part = [&](int64_t i, int64_t of) { isa->kernels->elementwise(job, i, of); };
        nanobind::gil_scoped_release released;
        share_out(threads, part);
    }

    void run_learned(uint64_t x, int64_t x_pitch, uint64_t dy, int64_t dy_pitch, uint64_t scale, int scale_code,
                     int64_t scale_pitch, double scale_number, uint64_t zero_point, int64_t zero_point_pitch,
                     int64_t zero_point_number, uint64_t out, uint64_t grad_scale, uint64_t grad_zero_point,
                     uint64_t workspace_address, int64_t threads) const {
        require(p_.op == FAKE_QUANTIZE_LEARNED_BACKWARD, "a plan whose scales are learned");
        threads = checked_threads(threads, numel_);
        Job job = given(x, x_pitch, dy, dy_pitch, scale, scale_code, scale_pitch, scale_number, zero_point,
                        zero_point_pitch, zero_point_number, out);
        job.grad_scale = checked(grad_scale, segments_, "grad_scale");
        job.grad_zero_point = checked(grad_zero_point, segments_, "grad_zero_point");
        job.sums = reinterpret_cast<double*>(checked(workspace_address, workspace(), "workspace"));
        auto learn = [&](int64_t i, int64_t of) { isa->kernels->learn(job, i, of); };
        auto total = [&](int64_t i, int64_t of) { isa->kernels->total(job, i, of); };
        nanobind::gil_scoped_release released;
        share_out(threads, learn);
        if (workspace()) share_out(segments_ < 64 ? 1 : threads, total);
    }

    void run_dynamic(uint64_t x, int64_t x_pitch, uint64_t scale_out, uint64_t zero_point_out, uint64_t out,
                     uint64_t workspace_address, int64_t threads) const {
        threads = checked_threads(threads, numel_);
        Job job = found(x, x_pitch, scale_out, zero_point_out, out);
        job.keys = reinterpret_cast<int64_t*>(checked(workspace_address, workspace(), "workspace"));
        nanobind::gil_scoped_release released;
        if (fused_) {
            auto part = [&](int64_t i, int64_t of) { isa->kernels->fused_range(job, i, of); };
            share_out(threads, part);
        } else {
            two_phases(job, threads);
        }
    }

    // What run_dynamic computes, as a job for kernels->fused_range.
    Job found(uint64_t x, int64_t x_pitch, uint64_t scale_out, uint64_t zero_point_out, uint64_t out) const {
        require(p_.op >= DYNAMIC_QUANTIZE, "a plan that finds its scales");
        Job job = begin();
        job.x = rows_of(checked(x, numel_, "input"), p_.last, x_pitch, p_.last);
        job.scale_out = checked(scale_out, segments_, "scale_out");
        job.zero_point_out = reinterpret_cast<int32_t*>(checked(zero_point_out, p_.asymmetric ? segments_ : 0, "zero_point_out"));
        if (p_.op != CHOOSE_QPARAMS) {
            const bool pairs = p_.op == DYNAMIC_QUANTIZE && is_packed(p_.quantized);
            job.out = rows_of(checked(out, numel_, "output"), p_.last, DENSE, pairs ? packed(p_.last) : p_.last);
        }
        return job;
    }

    // What run computes, as a job for kernels->elementwise.
    Job given(uint64_t x, int64_t x_pitch, uint64_t dy, int64_t dy_pitch, uint64_t scale, int scale_code,
              int64_t scale_pitch, double scale_number, uint64_t zero_point, int64_t zero_point_pitch,
              int64_t zero_point_number, uint64_t out) const {
        Job job = begin();
        const bool backward = p_.op >= QUANTIZE_BACKWARD, packs = is_packed(p_.quantized);
        const int64_t units = packs ? packed(p_.last) : p_.last;
        if (p_.op == DEQUANTIZE) {
            job.x = rows_of(checked(x, numel_, "input"), p_.last, x_pitch, units);
        } else if (p_.op != DEQUANTIZE_BACKWARD) {
            job.x = rows_of(checked(x, numel_, "input"), p_.last, x_pitch, p_.last);
        }
        if (backward) job.dy = rows_of(checked(dy, numel_, "grad_output"), p_.last, dy_pitch, p_.last);
        job.out = rows_of(checked(out, numel_, "output"), p_.last, DENSE, p_.op == QUANTIZE ? units : p_.last);
        if (scale) {
            require(scale_code == p_.element || scale_code == F32, "a scale of the input's type or f32");
            job.scale = rows_of(checked(scale, 1, "scale"), scale_length_, scale_pitch, scale_length_);
            job.scale_code = scale_code;
        } else {
            require(std::isfinite(scale_number) && scale_number > 0, "a scale that is finite and > 0");
        }
        job.scale_number = scale_number;
        if (zero_point)
            job.zero_point = rows_of(checked(zero_point, 1, "zero_point"), scale_length_, zero_point_pitch, scale_length_);
        require(std::abs(zero_point_number) <= MAX_ZERO_POINT, "a zero point within 2**24 - 256");
        job.zero_point_number = int32_t(zero_point_number);
        return job;
    }

    const Problem& problem() const { return p_; }

private:
    // Whether a block of whole segments stays in the cache between the pass that finds its range and the next.
    bool in_cache() const {
        const View& v = p_.view;
        if (numel_ == 0) return true;
        if (v.repeat > 1) return false;
        if (v.inner > 1) {
            const int64_t bytes = bytes_of(p_.element), columns = block_columns(v, bytes);
            return segments_ / columns >= MANY_BLOCKS && v.run * columns * bytes <= 2 * BLOCK_BYTES;
        }
        const bool shares_bytes = is_packed(p_.quantized) && v.run < p_.last;
        if (shares_bytes && p_.last / v.run > BLOCK_SEGMENTS) return false;
        return (shares_bytes ? p_.last : v.run) * bytes_of(p_.element) <= NEAR;
    }

    Job begin() const {
        Job job;
        job.p = p_;
        job.stream = stream_;
        return job;
    }

    void two_phases(const Job& job, int64_t threads) const {
        for (int64_t i = 0; i < segments_; ++i) {
            job.keys[i] = p_.asymmetric ? INT64_MIN : 0;
            if (p_.asymmetric) job.keys[segments_ + i] = INT64_MAX;
        }
        auto reduce = [&](int64_t i, int64_t of) { isa->kernels->reduce(job, i, of); };
        auto finish = [&](int64_t i, int64_t of) { isa->kernels->finish(job, i, of); };
        auto quantize = [&](int64_t i, int64_t of) { isa->kernels->elementwise(job, i, of); };
        share_out(threads, reduce);
        share_out(segments_ < 4096 ? 1 : threads, finish);
        if (p_.op != CHOOSE_QPARAMS) share_out(threads, quantize);
    }
};

}  // namespace baracuda
