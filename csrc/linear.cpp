// baracuda._cpu.Linear: what surrounds the integer product of a linear, and the whole of it for few rows.
#include <cstdlib>

#include "plan.hpp"

namespace nb = nanobind;

namespace baracuda {
namespace {

// Bytes of weights that a thread takes at a time: enough to be worth the taking, few enough to even out the threads.
constexpr int64_t PART_BYTES = 48 << 10, LEAST_ROWS = 16;

class Linear {
    int64_t m_, n_, k_;
    int element_, quantized_, weight_, activation_;
    int64_t group_;
    const Plan* quantization_;

public:
    // `group`: 0, or the number of weights along k that share an integer factor. `quantization`: of the activations, per
    // row, where they come as floats.
    Linear(int64_t m, int64_t n, int64_t k, int element, int quantized, int weight, int activation, int64_t group,
           const Plan* quantization)
        : m_(m), n_(n), k_(k), element_(checked_float(element)), quantized_(quantized), weight_(weight),
          activation_(activation), group_(group), quantization_(quantization) {
        require(quantized == S8 || quantized == U8, "s8 or u8 activations");
        require(weight == S8 || weight == S4, "an s8 or s4 weight");
        require(activation >= NONE && activation < ACTIVATION_COUNT, "an activation code");
        require(group >= 0 && (group == 0 || (weight == S4 && k % group == 0)), "groups of an s4 weight that divide k");
        product(product(m, n), 8), product(product(m, k), 8), product(product(n, k), 8);
        if (!quantization) return;
        const Problem& p = quantization->problem();
        const View& v = p.view;
        require(p.op == DYNAMIC_QUANTIZE && p.element == element && p.quantized == quantized && p.last == k &&
                    v.numel() == m * k && v.segments() == m && (m * k == 0 || v.repeat == 1),
                "a quantization of the m rows of k activations");
    }

    // Bytes that run needs beside the quantized activations.
    int64_t workspace() const { return prepared_bytes(m_, k_); }

    void weight_sums(uint64_t weight, int64_t weight_pitch, uint64_t factor, int64_t factor_pitch, uint64_t out,
                     int64_t threads) const {
        const Dot dot = weights(weight, weight_pitch, factor, factor_pitch);
        int32_t* sums = reinterpret_cast<int32_t*>(checked(out, n_, "weight_sum"));
        threads = checked_threads(threads, n_ * k_);
        auto part = [&](int64_t i, int64_t of) { isa->linears->weight_sums(dot, n_, k_, sums, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, part);
    }

    void unpack(uint64_t weight, int64_t weight_pitch, uint64_t factor, int64_t factor_pitch, uint64_t out,
                int64_t threads) const {
        require(weight_ == S4, "a plan with an s4 weight");
        const Dot dot = weights(weight, weight_pitch, factor, factor_pitch);
        int8_t* to = reinterpret_cast<int8_t*>(checked(out, n_ * k_, "unpacked"));
        threads = checked_threads(threads, n_ * k_);
        auto part = [&](int64_t i, int64_t of) { isa->linears->unpack(dot, n_, k_, to, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, part);
    }

    void shift(uint64_t act, int64_t act_pitch, uint64_t out, int64_t threads) const {
        Dot dot{};
        activations(dot, act, act_pitch);
        int8_t* to = reinterpret_cast<int8_t*>(checked(out, m_ * k_, "shifted"));
        threads = checked_threads(threads, m_ * k_);
        auto part = [&](int64_t i, int64_t of) { isa->linears->shift(dot, m_, k_, to, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, part);
    }

    void epilogue(uint64_t acc, nb::tuple scales, uint64_t weight_sum, int shift, uint64_t out, int64_t threads) const {
        const Epilogue e = scaled(scales, weight_sum, shift, out);
        const bool moved = shift || e.zero_point || e.zero_point_number;
        checked(weight_sum, moved ? m_ * n_ : 0, "weight_sum");
        const int32_t* sums = reinterpret_cast<const int32_t*>(checked(acc, m_ * n_, "acc"));
        threads = checked_threads(threads, m_ * n_);
        auto part = [&](int64_t i, int64_t of) { isa->linears->epilogue(e, sums, i, of); };
        nb::gil_scoped_release released;
        if (m_ * n_) share_out(threads, part);
    }

    // The whole linear. `x`: floats, which are quantized into `act_q`, or 0 where act_q is given.
    void run(uint64_t x, int64_t x_pitch, uint64_t act_q, int64_t act_pitch, uint64_t weight, int64_t weight_pitch,
             uint64_t factor, int64_t factor_pitch, nb::tuple scales, uint64_t weight_sum, uint64_t workspace_address,
             uint64_t out, int64_t threads) const {
        const Epilogue e = scaled(scales, weight_sum, 0, out);
        Dot dot = weights(weight, weight_pitch, factor, factor_pitch);
        activations(dot, act_q, act_pitch);
        dot.prepared = checked(workspace_address, workspace(), "workspace");
        require(workspace_address % 16 == 0, "a workspace that begins at a multiple of 16");
        Job job;
        if (quantization_) {
            require(act_pitch == DENSE && (e.scale_a || m_ == 0), "dense quantized activations with a scale each");
            job = quantization_->found(x, x_pitch, reinterpret_cast<uint64_t>(e.scale_a),
                                       reinterpret_cast<uint64_t>(e.zero_point), act_q);
        }
        const int64_t bytes = dot.w_packed ? packed(k_) : k_;
        int64_t rows = bytes ? PART_BYTES / bytes : n_;
        rows = rows < LEAST_ROWS ? LEAST_ROWS : rows;
        threads = checked_threads(threads, product(m_ > 0 ? m_ : 1, n_ * (k_ > 0 ? k_ : 1)));
        auto part = [&](int64_t i, int64_t of) { isa->linears->multiply(e, dot, i, of); };
        nb::gil_scoped_release released;
        if (m_ == 0) return;
        {
            PlainFloats plain;
            if (quantization_) isa->kernels->fused_range(job, 0, 1);
            if (n_) isa->linears->prepare(e, dot);
        }
        if (n_) share_out(threads, threads == 1 ? 1 : (n_ + rows - 1) / rows, part);
    }

private:
    Dot weights(uint64_t weight, int64_t pitch, uint64_t factor, int64_t factor_pitch) const {
        Dot dot{};
        dot.w = checked(weight, n_ * k_, "weight_q");
        dot.w_packed = weight_ == S4;
        dot.w_pitch = checked_pitch(pitch, dot.w_packed ? packed(k_) : k_);
        dot.factor = reinterpret_cast<const uint8_t*>(checked(factor, group_ ? n_ * k_ : 0, "weight_factor"));
        require(group_ || !factor, "no factors without a group size");
        dot.group = group_, dot.factor_pitch = checked_pitch(factor_pitch, group_ ? k_ / group_ : 0);
        return dot;
    }

    void activations(Dot& dot, uint64_t act, int64_t pitch) const {
        dot.a = checked(act, m_ * k_, "act_q");
        dot.a_unsigned = quantized_ == U8;
        dot.a_pitch = checked_pitch(pitch, k_);
    }

    // (scale_a address, code, number, zero point address, number, scale_w address, code, number, bias address, code,
    // residual address, pitch)
    Epilogue scaled(const nb::tuple& s, uint64_t weight_sum, int shift, uint64_t out) const {
        require(s.size() == 12, "twelve numbers that describe the scales");
        Epilogue e{};
        e.m = m_, e.n = n_, e.k = k_, e.element = element_, e.activation = activation_, e.shift = shift;
        e.out = checked(out, m_ * n_, "output");
        e.scale_a = reinterpret_cast<const void*>(nb::cast<uint64_t>(s[0]));
        e.scale_a_code = checked_float(nb::cast<int>(s[1]));
        e.scale_a_number = nb::cast<double>(s[2]);
        e.zero_point = reinterpret_cast<const int32_t*>(nb::cast<uint64_t>(s[3]));
        e.zero_point_number = nb::cast<int32_t>(s[4]);
        e.scale_w = reinterpret_cast<const void*>(nb::cast<uint64_t>(s[5]));
        e.scale_w_code = checked_float(nb::cast<int>(s[6]));
        e.scale_w_number = nb::cast<double>(s[7]);
        e.bias = reinterpret_cast<const void*>(nb::cast<uint64_t>(s[8]));
        e.bias_code = checked_float(nb::cast<int>(s[9]));
        e.residual = reinterpret_cast<const char*>(nb::cast<uint64_t>(s[10]));
        const int64_t pitch = nb::cast<int64_t>(s[11]);
        e.residual_pitch = checked_pitch(pitch, n_);
        require(shift == 0 || shift == 128, "a shift of 0 or 128");
        require(std::abs(e.zero_point_number) <= 255, "a zero point inside the activations' range");
        e.weight_sum = reinterpret_cast<const int32_t*>(weight_sum);
        return e;
    }
};

}  // namespace

void bind_linear(nb::module_& m) {
    nb::class_<Linear>(m, "Linear")
        .def(nb::init<int64_t, int64_t, int64_t, int, int, int, int, int64_t, const Plan*>(), nb::arg("m"), nb::arg("n"),
             nb::arg("k"), nb::arg("element"), nb::arg("quantized"), nb::arg("weight"), nb::arg("activation"),
             nb::arg("group") = 0, nb::arg("quantization").none() = nb::none(), nb::keep_alive<1, 10>())
        .def("workspace", &Linear::workspace)
        .def("weight_sums", &Linear::weight_sums)
        .def("unpack", &Linear::unpack)
        .def("shift", &Linear::shift)
        .def("epilogue", &Linear::epilogue)
        .def("run", &Linear::run);
}

}  // namespace baracuda
