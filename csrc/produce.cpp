// baracuda._cpu.Producer: norms and gated products, with their results as floats or quantized.
#include "operands.hpp"
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
    bool adds_, halves_;
    int count_, sum_at_, scale_at_, zero_point_at_;

public:
    // `quantization`: of the rows x d floats, each row by its own range or all by one scale; none where they stay floats.
    // `adds`: a norm of the sum of two inputs. `halves`: gate and up side by side in one row. Of the op's row: how many
    // operands there are, and where the sum, the scale and the zero point are, or -1; the output is the last.
    Producer(bool gated, int64_t rows, int64_t d, int element, int style, int activation, double eps,
             const Plan* quantization, bool adds, bool halves, int count, int sum_at, int scale_at, int zero_point_at)
        : rows_(rows), d_(d), element_(checked_float(element)), style_(style), activation_(activation), gated_(gated),
          eps_(eps), quantization_(quantization), adds_(adds), halves_(halves), count_(count), sum_at_(sum_at),
          scale_at_(scale_at), zero_point_at_(zero_point_at) {
        require(sum_at < count && scale_at < count && zero_point_at < count, "operands of the op's row");
        require(!adds || sum_at >= 0, "a place for the sum");
        require(!quantization || (scale_at >= 0 && zero_point_at >= 0), "places for the scale and the zero point");
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

    void launch(nb::handle given, nb::handle) const {
        const Operands operands(given, count_);
        const int64_t numel = rows_ * d_;
        Production p{};
        p.gated = gated_, p.rows = rows_, p.d = d_, p.element = element_, p.style = style_;
        p.activation = activation_, p.eps = eps_;
        const Operand x = operands[0];
        Operand other;
        if (halves_) {
            other = x, other.address += uint64_t(d_ * bytes_of(element_));
        } else if (gated_ || adds_) {
            other = operands[1];
        }
        const int64_t x_units = halves_ ? 2 * d_ : d_;
        p.x = rows_of(checked(x.address, numel, "input"), d_, checked_pitch(x.pitch, x_units), d_);
        const bool read = gated_ || (adds_ && other);
        p.other = rows_of(checked(other.address, read ? numel : 0, "addend or up"), d_,
                          checked_pitch(other.pitch, x_units), d_);
        if (!gated_) {
            const Operand weight = operands[2], bias = operands[3];
            p.weight = reinterpret_cast<const void*>(weight.address), p.weight_code = checked_float(weight.code);
            p.bias = reinterpret_cast<const void*>(bias.address), p.bias_code = checked_float(bias.code);
            if (read) p.sum_out = checked(operands[sum_at_].address, numel, "sum_out");
        }
        const uint64_t out = operands[count_ - 1].address;
        p.out = checked(out, numel, "output");
        p.quantizes = quantization_ != nullptr;
        if (p.quantizes) {
            const Operand scale = operands[scale_at_], zero_point = operands[zero_point_at_];
            if (quantization_->problem().op == DYNAMIC_QUANTIZE) {
                p.quantization = quantization_->found(x.address, DENSE, scale.address, zero_point.address, out);
            } else {
                p.quantization = quantization_->given(
                    x.address, DENSE, 0, DENSE, scale.address, scale.code, DENSE, scale.is_tensor ? 1 : scale.number(),
                    zero_point.address, DENSE, zero_point && !zero_point.is_tensor ? int64_t(zero_point.number()) : 0, out);
            }
        }
        const int64_t threads = threads_for(numel);
        auto part = [&](int64_t i, int64_t of) { isa->kernels->produce(p, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, part);
    }
};

}  // namespace

void bind_producer(nb::module_& m) {
    nb::class_<Producer>(m, "Producer")
        .def(nb::init<bool, int64_t, int64_t, int, int, int, double, const Plan*, bool, bool, int, int, int, int>(),
             nb::arg("gated"), nb::arg("rows"), nb::arg("d"), nb::arg("element"), nb::arg("style"),
             nb::arg("activation"), nb::arg("eps"), nb::arg("quantization").none(), nb::arg("adds"), nb::arg("halves"),
             nb::arg("count"), nb::arg("sum_at"), nb::arg("scale_at"), nb::arg("zero_point_at"), nb::keep_alive<1, 9>())
        .def("launch", &Producer::launch, nb::arg(), nb::arg().none());
}

}  // namespace baracuda
