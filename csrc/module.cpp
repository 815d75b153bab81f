// baracuda._cpu: plans over raw addresses. Python checks tensors; this side checks what it alone would be hurt by.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "job.hpp"
#include "pool.hpp"

namespace nb = nanobind;

namespace baracuda {

#if defined(__x86_64__)
extern const Kernels table_sse2, table_avx2, table_avx512;
#else
extern const Kernels table_native;
#endif

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("baracuda._cpu: " + what); }

void require(bool good, const char* what) {
    if (!good) refuse(std::string("expected ") + what);
}

// -- instruction sets --------------------------------------------------------------------------------------------

std::vector<const Kernels*> available() {
#if defined(__x86_64__)
    std::vector<const Kernels*> tables{&table_sse2};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        tables.push_back(&table_avx2);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            tables.push_back(&table_avx512);
    }
    return tables;
#else
    return {&table_native};
#endif
}

const Kernels* kernels = nullptr;

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels* table : available()) names.push_back(table->name);
    return names;
}

void use_isa(const std::string& name) {
    std::string names;
    for (const Kernels* table : available()) {
        if (name == table->name) {
            kernels = table;
            return;
        }
        names += (names.empty() ? "" : ", ") + std::string(table->name);
    }
    refuse("BARACUDA_ISA: expected one of " + names + " on this machine, got '" + name + "'");
}

// Whether 8-bit products are summed in 32 bits at once; older sets saturate at 16 bits on the way.
bool has_exact_int8_dot() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

// -- arguments ---------------------------------------------------------------------------------------------------

constexpr int64_t SMALL = 65536;       // elements: below, waking a thread costs more than it saves
constexpr int64_t STREAM = 8 << 20;    // bytes: a larger output would push out what the cache holds
constexpr int64_t NEAR = 2 << 20;      // bytes of whole segments that a second pass still finds in a cache
constexpr int64_t MANY_BLOCKS = 16;    // enough for threads to have whole ones

int64_t checked_threads(int64_t threads, int64_t elements) {
    require(threads >= 1 && threads <= MAX_THREADS, "1 to 1024 threads");
    return elements < SMALL ? 1 : threads;
}

int64_t product(int64_t a, int64_t b) {
    int64_t result;
    require(a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, &result), "sizes whose product fits 62 bits");
    require(result < int64_t(1) << 58, "sizes whose product fits 58 bits");
    return result;
}

char* checked(uint64_t address, int64_t elements, const char* name) {
    if (elements > 0 && address == 0) refuse(std::string(name) + ": expected an address, got 0");
    return reinterpret_cast<char*>(address);
}

// Rows of `length` elements, `pitch` storage units apart; DENSE stands for as many as a row has.
constexpr int64_t DENSE = -1;

Rows rows_of(char* data, int64_t length, int64_t pitch, int64_t units) {
    require(pitch >= DENSE, "a row pitch that is not negative, or -1 for dense rows");
    Rows rows;
    rows.data = data;
    rows.length = length > 0 ? length : 1;
    rows.dense = pitch == DENSE || pitch == units;
    rows.pitch = rows.dense ? units : pitch;
    return rows;
}

bool fits(int element, int q_min, int q_max) {
    const int low = element == S8 ? -128 : element == S4 ? -8 : 0;
    const int high = element == S8 ? 127 : element == U8 ? 255 : element == S4 ? 7 : 15;
    return low <= q_min && q_min <= q_max && q_max <= high;
}

// -- plans -------------------------------------------------------------------------------------------------------

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
        stream_ = op != CHOOSE_QPARAMS && numel_ * (integers ? 1 : bytes_of(element)) >= STREAM;
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
        auto part = [&](int64_t i, int64_t of) { kernels->elementwise(job, i, of); };
        nb::gil_scoped_release released;
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
        auto learn = [&](int64_t i, int64_t of) { kernels->learn(job, i, of); };
        auto total = [&](int64_t i, int64_t of) { kernels->total(job, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, learn);
        if (workspace()) share_out(segments_ < 64 ? 1 : threads, total);
    }

    void run_dynamic(uint64_t x, int64_t x_pitch, uint64_t scale_out, uint64_t zero_point_out, uint64_t out,
                     uint64_t workspace_address, int64_t threads) const {
        require(p_.op >= DYNAMIC_QUANTIZE, "a plan that finds its scales");
        threads = checked_threads(threads, numel_);
        Job job = begin();
        job.x = rows_of(checked(x, numel_, "input"), p_.last, x_pitch, p_.last);
        job.scale_out = checked(scale_out, segments_, "scale_out");
        job.zero_point_out = reinterpret_cast<int32_t*>(checked(zero_point_out, p_.asymmetric ? segments_ : 0, "zero_point_out"));
        if (p_.op != CHOOSE_QPARAMS) {
            const bool pairs = p_.op == DYNAMIC_QUANTIZE && is_packed(p_.quantized);
            job.out = rows_of(checked(out, numel_, "output"), p_.last, DENSE, pairs ? packed(p_.last) : p_.last);
        }
        job.keys = reinterpret_cast<int64_t*>(checked(workspace_address, workspace(), "workspace"));
        nb::gil_scoped_release released;
        if (fused_) {
            auto part = [&](int64_t i, int64_t of) { kernels->fused_range(job, i, of); };
            share_out(threads, part);
        } else {
            two_phases(job, threads);
        }
    }

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
        auto reduce = [&](int64_t i, int64_t of) { kernels->reduce(job, i, of); };
        auto finish = [&](int64_t i, int64_t of) { kernels->finish(job, i, of); };
        auto quantize = [&](int64_t i, int64_t of) { kernels->elementwise(job, i, of); };
        share_out(threads, reduce);
        share_out(segments_ < 4096 ? 1 : threads, finish);
        if (p_.op != CHOOSE_QPARAMS) share_out(threads, quantize);
    }
};

// -- linears -----------------------------------------------------------------------------------------------------

class Linear {
    int64_t m_, n_, k_;
    int element_, quantized_, weight_, activation_;

public:
    Linear(int64_t m, int64_t n, int64_t k, int element, int quantized, int weight, int activation)
        : m_(m), n_(n), k_(k), element_(element), quantized_(quantized), weight_(weight), activation_(activation) {
        require(element >= F16 && element <= F64, "a float element code");
        require(quantized == S8 || quantized == U8, "s8 or u8 activations");
        require(weight == S8 || weight == S4, "an s8 or s4 weight");
        require(activation >= NONE && activation < ACTIVATION_COUNT, "an activation code");
        product(product(m, n), 8), product(product(m, k), 8), product(product(n, k), 8);
    }

    void weight_sums(uint64_t weight, int64_t weight_pitch, uint64_t out, int64_t threads) const {
        const Dot dot = operands(0, DENSE, weight, weight_pitch, false);
        int32_t* sums = reinterpret_cast<int32_t*>(checked(out, n_, "weight_sum"));
        threads = checked_threads(threads, n_ * k_);
        auto part = [&](int64_t i, int64_t of) { kernels->weight_sums(dot, n_, k_, sums, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, part);
    }

    void unpack(uint64_t weight, int64_t weight_pitch, uint64_t out, int64_t threads) const {
        require(weight_ == S4, "a plan with an s4 weight");
        const Dot dot = operands(0, DENSE, weight, weight_pitch, false);
        int8_t* to = reinterpret_cast<int8_t*>(checked(out, n_ * k_, "unpacked"));
        threads = checked_threads(threads, n_ * k_);
        auto part = [&](int64_t i, int64_t of) { kernels->unpack(dot, n_, k_, to, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, part);
    }

    void shift(uint64_t act, int64_t act_pitch, uint64_t out, int64_t threads) const {
        const Dot dot = operands(act, act_pitch, 0, DENSE, true);
        int8_t* to = reinterpret_cast<int8_t*>(checked(out, m_ * k_, "shifted"));
        threads = checked_threads(threads, m_ * k_);
        auto part = [&](int64_t i, int64_t of) { kernels->shift(dot, m_, k_, to, i, of); };
        nb::gil_scoped_release released;
        share_out(threads, part);
    }

    void epilogue(uint64_t acc, nb::tuple scales, uint64_t weight_sum, int shift, uint64_t out, int64_t threads) const {
        const Epilogue e = scaled(scales, weight_sum, shift, out);
        const bool moved = shift || e.zero_point || e.zero_point_number;
        checked(weight_sum, moved ? m_ * n_ : 0, "weight_sum");
        const int32_t* sums = reinterpret_cast<const int32_t*>(checked(acc, m_ * n_, "acc"));
        threads = checked_threads(threads, m_ * n_);
        auto part = [&](int64_t i, int64_t of) { kernels->epilogue(e, sums, i, of); };
        nb::gil_scoped_release released;
        if (m_ * n_) share_out(threads, part);
    }

    void small(uint64_t act, int64_t act_pitch, uint64_t weight, int64_t weight_pitch, nb::tuple scales, uint64_t out,
               int64_t threads) const {
        const Epilogue e = scaled(scales, 0, 0, out);
        Dot dot = operands(act, act_pitch, weight, weight_pitch, true);
        checked(weight, n_ * k_, "weight_q");
        threads = checked_threads(threads, product(m_ > 0 ? m_ : 1, n_ * (k_ > 0 ? k_ : 1)));
        auto part = [&](int64_t i, int64_t of) { kernels->small_linear(e, dot, i, of); };
        nb::gil_scoped_release released;
        if (m_ * n_) share_out(threads, part);
    }

private:
    Dot operands(uint64_t act, int64_t act_pitch, uint64_t weight, int64_t weight_pitch, bool reads_act) const {
        require(act_pitch >= DENSE && weight_pitch >= DENSE, "a row pitch that is not negative, or -1 for dense rows");
        Dot dot;
        dot.a = checked(act, reads_act ? m_ * k_ : 0, "act_q");
        dot.a_unsigned = quantized_ == U8;
        dot.a_pitch = act_pitch != DENSE ? act_pitch : k_;
        dot.w = checked(weight, reads_act ? 0 : n_ * k_, "weight_q");
        dot.w_packed = weight_ == S4;
        dot.w_pitch = weight_pitch != DENSE ? weight_pitch : dot.w_packed ? (k_ + 1) / 2 : k_;
        return dot;
    }

    // (scale_a address, code, number, zero point address, number, scale_w address, code, number, bias address, code,
    // residual address, pitch)
    Epilogue scaled(const nb::tuple& s, uint64_t weight_sum, int shift, uint64_t out) const {
        require(s.size() == 12, "twelve numbers that describe the scales");
        Epilogue e{};
        e.m = m_, e.n = n_, e.k = k_, e.element = element_, e.activation = activation_, e.shift = shift;
        e.out = checked(out, m_ * n_, "output");
        e.scale_a = reinterpret_cast<const void*>(nb::cast<uint64_t>(s[0]));
        e.scale_a_code = code(nb::cast<int>(s[1]));
        e.scale_a_number = nb::cast<double>(s[2]);
        e.zero_point = reinterpret_cast<const int32_t*>(nb::cast<uint64_t>(s[3]));
        e.zero_point_number = nb::cast<int32_t>(s[4]);
        e.scale_w = reinterpret_cast<const void*>(nb::cast<uint64_t>(s[5]));
        e.scale_w_code = code(nb::cast<int>(s[6]));
        e.scale_w_number = nb::cast<double>(s[7]);
        e.bias = reinterpret_cast<const void*>(nb::cast<uint64_t>(s[8]));
        e.bias_code = code(nb::cast<int>(s[9]));
        e.residual = reinterpret_cast<const char*>(nb::cast<uint64_t>(s[10]));
        const int64_t pitch = nb::cast<int64_t>(s[11]);
        require(pitch >= DENSE, "a row pitch that is not negative, or -1 for dense rows");
        e.residual_pitch = pitch == DENSE ? n_ : pitch;
        require(shift == 0 || shift == 128, "a shift of 0 or 128");
        require(std::abs(e.zero_point_number) <= 255, "a zero point inside the activations' range");
        e.weight_sum = reinterpret_cast<const int32_t*>(weight_sum);
        return e;
    }

    static int code(int element) {
        require(element >= F16 && element <= F64, "a float element code");
        return element;
    }
};

}  // namespace
}  // namespace baracuda

NB_MODULE(_cpu, m) {
    using namespace baracuda;
    nb::set_leak_warnings(false);  // plans live in caches until the interpreter ends
    m.doc() = "The compiled kernels of the CPU backend. Private: baracuda.backends.cpu checks what goes in here.";
    const char* wanted = std::getenv("BARACUDA_ISA");
    use_isa(wanted && *wanted ? wanted : isas().back());
    m.def("isa", [] { return std::string(kernels->name); }, "The instruction set in use.");
    m.def("isas", &isas, "The instruction sets of this machine, least first.");
    m.def("use_isa", &use_isa, nb::arg("name"), "Use another instruction set from now on.");
    m.def("has_exact_int8_dot", &has_exact_int8_dot);
    nb::class_<Plan>(m, "Plan")
        .def(nb::init<int, int, int, int, int, int, bool, bool, bool, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(),
             nb::arg("op"), nb::arg("element"), nb::arg("quantized"), nb::arg("scale_element"), nb::arg("q_min"),
             nb::arg("q_max"), nb::arg("asymmetric"), nb::arg("include_zero"), nb::arg("reciprocal"), nb::arg("repeat"),
             nb::arg("rows"), nb::arg("run"), nb::arg("inner"), nb::arg("last"), nb::arg("scale_length"))
        .def("workspace", &Plan::workspace)
        .def("run", &Plan::run)
        .def("run_learned", &Plan::run_learned)
        .def("run_dynamic", &Plan::run_dynamic);
    nb::class_<Linear>(m, "Linear")
        .def(nb::init<int64_t, int64_t, int64_t, int, int, int, int>())
        .def("weight_sums", &Linear::weight_sums)
        .def("unpack", &Linear::unpack)
        .def("shift", &Linear::shift)
        .def("epilogue", &Linear::epilogue)
        .def("small", &Linear::small);
}
