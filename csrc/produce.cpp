// baracuda._cpu.Producer: norms and gated products, with their results as floats or quantized.
#include "plan.hpp"

namespace nb = nanobind;

namespace baracuda {
namespace {

class Producer {
    int64_t rows_, d_;
    int element_, style_, activation_;
    bool gated_;
    double eps_;
    const Plan* quantization_;

public:
    // `quantization`: of the rows x d floats, each row by its own range or all by one scale; none where they stay floats.
    Producer(bool gated, int64_t rows, int64_t d, int element, int style, int activation, double eps,
             const Plan* quantization)
        : rows_(rows), d_(d), element_(checked_float(element)), style_(style), activation_(activation), gated_(gated),
          eps_(eps), quantization_(quantization) {
        product(product(rows, d), 16);
        require(style >= LLAMA && style < STYLE_COUNT, "a style of norm");
        require(activation >= NONE && activation < ACTIVATION_COUNT, "an activation code");
        require(eps >= 0, "an eps that is not negative");
        if (!quantization) return;
        const Problem& p = quantization->problem();
        require((p.op == DYNAMIC_QUANTIZE || p.op == QUANTIZE) && p.element == element && p.view.numel() == rows * d &&
                    p.view.segments() == (p.op == QUANTIZE ? 1 : rows) && p.last == d,
                "a quantization of the rows");
    }

    // `x` and `other`: the input and what is added to it, or the gate and what it is multiplied with.
    void run(uint64_t x, int64_t x_pitch, uint64_t other, int64_t other_pitch, uint64_t weight, int weight_code,
             uint64_t bias, int bias_code, uint64_t sum_out, uint64_t scale, int scale_code, double scale_number,
             uint64_t zero_point, int64_t zero_point_number, uint64_t out, int64_t threads) const {
        const int64_t numel = rows_ * d_;
        Production p{};
        p.gated = gated_, p.rows = rows_, p.d = d_, p.element = element_, p.style = style_;
        p.activation = activation_, p.eps = eps_;
        p.x = rows_of(checked(x, numel, "input"), d_, x_pitch, d_);
        p.other = rows_of(checked(other, gated_ || sum_out ? numel : 0, "addend or up"), d_, other_pitch, d_);
        p.weight = reinterpret_cast<const void*>(weight), p.weight_code = checked_float(weight_code);
        p.bias = reinterpret_cast<const void*>(bias), p.bias_code = checked_float(bias_code);
        p.sum_out = reinterpret_cast<char*>(sum_out);
        p.out = checked(out, numel, "output");
        p.quantizes = quantization_ != nullptr;
        if (quantization_ && quantization_->problem().op == DYNAMIC_QUANTIZE) {
            p.quantization = quantization_->found(x, DENSE, scale, zero_point, out);
        } else if (quantization_) {
            p.quantization = quantization_->given(x, DENSE, 0, DENSE, scale, scale_code, DENSE, scale_number, zero_point,
                                                  DENSE, zero_point_number, out);
        }
        threads = checked_threads(threads, numel);
        auto part = [&](int64_t i, int64_t of) { isa->kernels->produce(p, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, part);
    }
};

}  // namespace

void bind_producer(nb::module_& m) {
    nb::class_<Producer>(m, "Producer")
        .def(nb::init<bool, int64_t, int64_t, int, int, int, double, const Plan*>(), nb::arg("gated"), nb::arg("rows"),
             nb::arg("d"), nb::arg("element"), nb::arg("style"), nb::arg("activation"), nb::arg("eps"),
             nb::arg("quantization").none() = nb::none(), nb::keep_alive<1, 9>())
        .def("run", &Producer::run);
}

}  // namespace baracuda
