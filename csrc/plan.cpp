#include "plan.hpp"

namespace nb = nanobind;

namespace baracuda {

void bind_plan(nb::module_& m) {
    nb::class_<Plan>(m, "Plan")
        .def(nb::init<int, int, int, int, int, int, bool, bool, bool, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(),
             nb::arg("op"), nb::arg("element"), nb::arg("quantized"), nb::arg("scale_element"), nb::arg("q_min"),
             nb::arg("q_max"), nb::arg("asymmetric"), nb::arg("include_zero"), nb::arg("reciprocal"), nb::arg("repeat"),
             nb::arg("rows"), nb::arg("run"), nb::arg("inner"), nb::arg("last"), nb::arg("scale_length"))
        .def("workspace", &Plan::workspace)
        .def("run", &Plan::run)
        .def("run_learned", &Plan::run_learned)
        .def("run_dynamic", &Plan::run_dynamic);
}

}  // namespace baracuda
