// baracuda._cpu.Linear: what surrounds the integer product of a linear, and the whole of it for few rows.
#include <cstdlib>

#include "operands.hpp"
#include "plan.hpp"

namespace nb = nanobind;

namespace baracuda {
namespace {

// Bytes of weights that a thread takes at a time, as many parts for each. Every part begins new streams of memory, so
// parts are long, and small weights have one for each thread.
constexpr int64_t PART_BYTES = 2 << 20, LEAST_ROWS = 16;

int64_t parts_of(int64_t n, int64_t k, int weight, int64_t threads) {
    if (threads == 1) return 1;
    const int64_t bytes = is_packed(weight) ? packed(k) : k, rows = PART_BYTES / (bytes ? bytes : 1);
    const int64_t each = threads * (rows < LEAST_ROWS ? LEAST_ROWS : rows);
    return (n + each - 1) / each * threads;
}

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

    // Bytes that launch needs.
    int64_t workspace() const { return prepared_at() + prepared_bytes(m_, k_); }

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

    // acc holds the sums of `rows` rows, from row `first` on.
    void epilogue(uint64_t acc, nb::tuple scales, uint64_t weight_sum, int shift, uint64_t out, int64_t first, int64_t rows,
                  int64_t threads) const {
        require(0 <= first && 0 <= rows && first <= m_ && rows <= m_ - first, "rows of the output");
        Epilogue e = scaled(scales, weight_sum, shift, out);
        const bool moved = shift || e.zero_point || e.zero_point_number;
        checked(weight_sum, moved ? rows * n_ : 0, "weight_sum");
        const int32_t* sums = reinterpret_cast<const int32_t*>(checked(acc, rows * n_, "acc"));
        e.m = rows, e.out += first * n_ * bytes_of(element_);
        if (e.scale_a) e.scale_a = static_cast<const char*>(e.scale_a) + first * bytes_of(e.scale_a_code);
        if (e.zero_point) e.zero_point += first;
        if (e.residual) e.residual += first * e.residual_pitch * bytes_of(element_);
        threads = checked_threads(threads, rows * n_);
        auto part = [&](int64_t i, int64_t of) { isa->linears->epilogue(e, sums, i, of); };
        nb::gil_scoped_release released;
        if (rows * n_) share_out(threads, part);
    }

    // The whole linear, from the operands of its op's row. Without a workspace it uses memory of its thread.
    void launch(nb::handle given, nb::handle room) const {
        const Operands operands(given, 10);
        const bool dynamic = quantization_ != nullptr;
        const int weight_at = dynamic ? 1 : 3;  // then its scale, bias, weight sum, residual and factors
        const Operand weight = operands[weight_at], residual = operands[weight_at + 4], factor = operands[weight_at + 5];
        const uint64_t base = workspace_of(room, workspace());
        require(base % 16 == 0, "a workspace that begins at a multiple of 16");
        Epilogue e = outputs(operands[9].address, operands[weight_at + 3].address, 0);
        scale_weights(e, operands[weight_at + 1], operands[weight_at + 2]);
        e.residual = reinterpret_cast<const char*>(residual.address);
        e.residual_pitch = checked_pitch(residual.pitch, n_);
        Dot dot = weights(weight.address, weight.pitch, factor.address, factor.pitch);
        dot.prepared = checked(base + prepared_at(), prepared_bytes(m_, k_), "workspace");
        Job job;
        if (dynamic) {
            const Operand x = operands[0], act_q = operands[7], act_scale = operands[8];
            const uint64_t act = act_q ? act_q.address : base;
            const uint64_t scale = act_scale ? act_scale.address : base + scale_at();
            const uint64_t zero_point = quantization_->problem().asymmetric ? base + zero_point_at() : 0;
            activations(dot, act, DENSE);
            e.scale_a = reinterpret_cast<const void*>(scale), e.scale_a_code = quantization_->problem().scale_element;
            e.zero_point = reinterpret_cast<const int32_t*>(zero_point);
            job = quantization_->found(x.address, x.pitch, scale, zero_point, act);
        } else {
            const Operand act_q = operands[0];
            activations(dot, act_q.address, act_q.pitch);
            scale_activations(e, operands[1], operands[2]);
        }
        const int64_t work = product(m_ > 0 ? m_ : 1, n_ * (k_ > 0 ? k_ : 1)), threads = threads_for(work);
        auto part = [&](int64_t i, int64_t of) { isa->linears->multiply(e, dot, i, of); };
        nb::gil_scoped_release released;
        if (m_ == 0) return;
        {
            PlainFloats plain;
            if (dynamic) isa->kernels->fused_range(job, 0, 1);
            if (n_) isa->linears->prepare(e, dot);
        }
        if (n_) share_out(threads, parts_of(n_, k_, weight_, threads), part);
    }

private:
    // The workspace: the quantized activations, their scales and zero points, and how the product wants them.
    int64_t scale_at() const { return quantization_ ? aligned(m_ * k_) : 0; }
    int64_t zero_point_at() const { return scale_at() + (quantization_ ? aligned(m_ * 8) : 0); }
    int64_t prepared_at() const { return zero_point_at() + (quantization_ ? aligned(m_ * 4) : 0); }
    static int64_t aligned(int64_t bytes) { return (bytes + WIDEST - 1) / WIDEST * WIDEST; }

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
        Epilogue e = outputs(out, weight_sum, shift);
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
        return e;
    }

    Epilogue outputs(uint64_t out, uint64_t weight_sum, int shift) const {
        Epilogue e{};
        e.m = m_, e.n = n_, e.k = k_, e.element = element_, e.activation = activation_, e.shift = shift;
        e.out = checked(out, m_ * n_, "output");
        e.scale_a_number = e.scale_w_number = 1, e.scale_a_code = e.scale_w_code = e.bias_code = F32;
        e.weight_sum = reinterpret_cast<const int32_t*>(weight_sum);
        return e;
    }

    static void scale_weights(Epilogue& e, const Operand& scale, const Operand& bias) {
        e.scale_w = reinterpret_cast<const void*>(scale.address);
        if (scale.is_tensor) e.scale_w_code = checked_float(scale.code);
        else e.scale_w_number = scale.number();
        e.bias = reinterpret_cast<const void*>(bias.address), e.bias_code = checked_float(bias.code);
    }

    // A scale for each row, or one number; one zero point, inside the activations' range.
    void scale_activations(Epilogue& e, const Operand& scale, const Operand& zero_point) const {
        if (scale.is_tensor && scale.tensor.ndim) {
            e.scale_a = reinterpret_cast<const void*>(scale.address), e.scale_a_code = checked_float(scale.code);
        } else {
            e.scale_a_number = scale.number();
        }
        const double low = quantized_ == U8 ? 0 : -128, number = zero_point ? zero_point.number() : 0;
        e.zero_point_number = int32_t(number < low ? low : number > low + 255 ? low + 255 : number);
    }
};

// The linear of float activations and integer weights.
class WeightOnlyLinear {
    int64_t m_, n_, k_;
    int element_, weight_, activation_;
    int64_t group_;

public:
    // `group`: 0, or the number of weights along k that share a scale and a zero point.
    WeightOnlyLinear(int64_t m, int64_t n, int64_t k, int element, int weight, int activation, int64_t group)
        : m_(m), n_(n), k_(k), element_(checked_float(element)), weight_(weight), activation_(activation), group_(group) {
        require(weight == S8 || weight == S4 || weight == U4, "an s8, s4 or u4 weight");
        require(activation >= NONE && activation < ACTIVATION_COUNT, "an activation code");
        require(group >= 0 && (group == 0 || k % group == 0), "groups that divide k");
        product(product(m, n), 8), product(product(m, k + 32), 8), product(product(n, k), 8);
    }

    int64_t workspace() const { return m_ * ((k_ + 31) / 32 * 32) * (element_ == F64 ? 8 : 4); }

    // From the operands of its op's row. Without a workspace it uses memory of its thread.
    void launch(nb::handle given, nb::handle room) const {
        const Operands operands(given, 7);
        const Operand x = operands[0], weight = operands[1], scale = operands[2], zero_point = operands[3];
        const Operand bias = operands[4], residual = operands[5];
        const int64_t segments = group_ ? k_ / group_ : 1;
        FloatWeights f{};
        f.x = checked(x.address, m_ * k_, "activation"), f.x_pitch = checked_pitch(x.pitch, k_);
        f.w = checked(weight.address, n_ * k_, "weight_q"), f.weight = weight_;
        f.w_pitch = checked_pitch(weight.pitch, is_packed(weight_) ? packed(k_) : k_);
        f.scale = checked(scale.address, n_ * segments, "weight_scale"), f.scale_code = checked_float(scale.code);
        f.scale_pitch = checked_pitch(scale.pitch, segments);
        f.zero_point = reinterpret_cast<const int32_t*>(zero_point.address);
        f.zero_point_pitch = checked_pitch(zero_point.pitch, segments);
        f.group = group_ ? group_ : (k_ / 32 + 1) * 32;  // one for all of k, which may be empty
        const uint64_t base = workspace_of(room, workspace());
        f.prepared = checked(base, workspace(), "workspace");
        require(base % 16 == 0, "a workspace that begins at a multiple of 16");
        Epilogue e{};
        e.m = m_, e.n = n_, e.k = k_, e.element = element_, e.activation = activation_;
        e.out = checked(operands[6].address, m_ * n_, "output");
        e.scale_a_number = e.scale_w_number = 1;
        e.bias = reinterpret_cast<const void*>(bias.address), e.bias_code = checked_float(bias.code);
        e.residual = reinterpret_cast<const char*>(residual.address);
        e.residual_pitch = checked_pitch(residual.pitch, n_);
        const int64_t threads = threads_for(product(m_ > 0 ? m_ : 1, n_ * (k_ > 0 ? k_ : 1)));
        auto part = [&](int64_t i, int64_t of) { isa->linears->multiply_floats(e, f, i, of); };
        nb::gil_scoped_release released;
        if (m_ * n_ == 0) return;
        {
            PlainFloats plain;
            isa->linears->prepare_floats(e, f);
        }
        share_out(threads, parts_of(n_, k_, weight_, threads), part);
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
        .def("launch", &Linear::launch, nb::arg(), nb::arg().none());
    nb::class_<WeightOnlyLinear>(m, "WeightOnlyLinear")
        .def(nb::init<int64_t, int64_t, int64_t, int, int, int, int64_t>(), nb::arg("m"), nb::arg("n"), nb::arg("k"),
             nb::arg("element"), nb::arg("weight"), nb::arg("activation"), nb::arg("group") = 0)
        .def("workspace", &WeightOnlyLinear::workspace)
        .def("launch", &WeightOnlyLinear::launch, nb::arg(), nb::arg().none());
}

}  // namespace baracuda
