// baracuda._host: what every call of a plan does on the host, on every device: check the operands, launch the kernel.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "calls.hpp"
#include "launcher.hpp"

namespace nb = nanobind;

namespace baracuda {

Torch torch;

namespace {

using RuleFields =
    std::tuple<std::vector<std::tuple<int, int>>, std::vector<int64_t>, bool, bool, std::string, double, double>;

Rule rule_of(const RuleFields& fields) {
    const auto& [dtypes, shape, output, optional, number, low, high] = fields;
    Rule rule{{}, shape, output, optional, number.empty() ? '\0' : number[0], low, high};
    for (const auto& [code, bits] : dtypes) rule.dtypes.push_back(word({uint8_t(code), uint8_t(bits), 1}));
    return rule;
}

using SourceFields = std::tuple<int, int64_t, int, int>;

std::vector<Source> sources_of(const std::vector<SourceFields>& fields) {
    std::vector<Source> sources;
    for (const auto& [operand, offset, code, bits] : fields)
        sources.push_back({operand, offset, word({uint8_t(code), uint8_t(bits), 1})});
    return sources;
}

template <class Call>
auto raising(Call call) {
    try {
        return call();
    } catch (const PythonError&) {
        throw nb::python_error();
    }
}

}  // namespace
}  // namespace baracuda

NB_MODULE(_host, m) {
    using namespace baracuda;
    nb::set_leak_warnings(false);  // plans live in caches until the interpreter ends
    m.doc() = "The host's part of a call. Private: baracuda.checks and baracuda.backends.triton stand before it.";
    find_torch();
    nb::class_<Checker>(m, "Checker")
        .def("__init__",
             [](Checker* self, const std::vector<RuleFields>& fields, int device_type, int device_index,
                bool elementwise, bool rows) {
                 std::vector<Rule> rules;
                 for (const RuleFields& rule : fields) rules.push_back(rule_of(rule));
                 new (self) Checker(std::move(rules), {device_type, device_index}, elementwise, rows);
             })
        .def("fits", [](const Checker& self, nb::handle operands) { return self.fits(tuple_of(operands)); })
        .def("fits_along", [](const Checker& self, nb::handle operands) { return self.fits(tuple_of(operands), true); })
        .def("holds",
             [](const Checker& self, nb::handle workspace, nb::handle operands, uint64_t size, uint64_t alignment) {
                 return self.holds(workspace.ptr(), tuple_of(operands), size, alignment);
             },
             nb::arg().none(), nb::arg(), nb::arg(), nb::arg());
    // Never destroyed: it holds objects of an interpreter that may be gone by then.
    const PlainCall* plain = new PlainCall;
    m.def("is_plain_call", [plain](nb::handle x) { return (*plain)(x.ptr()); }, nb::arg("x").none());
    nb::class_<Computation>(m, "Computation")
        .def(nb::init<nb::object, bool, nb::tuple, nb::object, nb::object>(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg())
        .def("compute", &Computation::compute);
    nb::class_<Lookup>(m, "Lookup")
        .def("__init__", [plain](Lookup* self) { new (self) Lookup(*plain); })
        .def("take", &Lookup::take, nb::arg(), nb::arg().none())
        .def("add", &Lookup::add, nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
        .def("find", &Lookup::find, nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg().none())
        .def("__reduce__", [](nb::handle self) { return nb::make_tuple(self.type(), nb::tuple()); });  // copies start empty
    nb::class_<Driver>(m, "Driver").def(nb::init<const std::string&>()).def_ro("version", &Driver::version);
    nb::class_<Kernel>(m, "Kernel")
        .def(nb::init<std::string, uint64_t, unsigned, unsigned, unsigned, bool>())
        .def("constant", &Kernel::constant)
        .def("address", &Kernel::address)
        .def("number", &Kernel::number)
        .def("matrix", &Kernel::matrix)
        .def("parameters", &Kernel::parameters);
    nb::class_<Launcher>(m, "Launcher")
        .def("__init__",
             [](Launcher* self, std::shared_ptr<Driver> driver, int index, const std::vector<SourceFields>& sources,
                uint32_t vectors, uint64_t alignment) {
                 new (self) Launcher(std::move(driver), index, sources_of(sources), vectors, alignment);
             })
        .def("add",
             [](Launcher& self, nb::handle operands, nb::handle workspace, std::shared_ptr<Kernel> kernel) {
                 raising([&] { self.add(tuple_of(operands), workspace.ptr(), std::move(kernel)); });
             },
             nb::arg(), nb::arg().none(), nb::arg())
        .def("launch",
             [](Launcher& self, nb::handle operands, nb::handle workspace) {
                 return raising([&] { return self.launch(tuple_of(operands), workspace.ptr()); });
             },
             nb::arg(), nb::arg().none())
        .def("use_context", &Launcher::use_context);
}
