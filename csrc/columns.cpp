// baracuda._cpu.round_columns: the inner loop of GPTQ.
#include "checks.hpp"
#include "module.hpp"

namespace nb = nanobind;

namespace baracuda {
namespace {

void round_columns(int64_t count, int64_t rows, int64_t pitch, float low, float high, uint64_t values,
                   uint64_t factor, uint64_t scale, uint64_t groups, uint64_t integers, uint64_t passed) {
    const int64_t numel = product(count, rows);
    require(pitch >= count, "a pitch of at least as many elements as there are columns");
    Columns c{};
    c.count = count, c.rows = rows, c.pitch = pitch, c.low = low, c.high = high;
    c.values = reinterpret_cast<const float*>(checked(values, numel, "values"));
    c.factor = reinterpret_cast<const float*>(checked(factor, numel, "factor"));
    c.scale = reinterpret_cast<const float*>(checked(scale, numel, "scale"));
    c.groups = reinterpret_cast<const int64_t*>(checked(groups, count, "groups"));
    c.integers = reinterpret_cast<float*>(checked(integers, numel, "integers"));
    c.passed = reinterpret_cast<float*>(checked(passed, numel, "errors"));
    nb::gil_scoped_release released;
    isa->kernels->round_columns(c);
}

}  // namespace

void bind_columns(nb::module_& m) { m.def("round_columns", &round_columns); }

}  // namespace baracuda
