// baracuda._cpu: plans over raw addresses.
#include "module.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>

#include "checks.hpp"
#include "torch.hpp"

namespace nb = nanobind;

namespace baracuda {

const Isa* isa = nullptr;
Torch torch;

namespace {

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Isa& compiled : compiled_isas())
        if (compiled.runs_here) names.push_back(compiled.name);
    return names;
}

void use_isa(const std::string& name) {
    std::string names;
    for (const Isa& compiled : compiled_isas()) {
        if (!compiled.runs_here) continue;
        if (name == compiled.name) {
            isa = &compiled;
            return;
        }
        names += (names.empty() ? "" : ", ") + std::string(compiled.name);
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

}  // namespace
}  // namespace baracuda

NB_MODULE(_cpu, m) {
    using namespace baracuda;
    nb::set_leak_warnings(false);  // plans live in caches until the interpreter ends
    m.doc() = "The compiled kernels of the CPU backend. Private: baracuda.backends.cpu checks what goes in here.";
    find_torch();
    const char* wanted = std::getenv("BARACUDA_ISA");
    use_isa(wanted && *wanted ? wanted : isas().back());
    m.def("isa", [] { return std::string(isa->name); }, "The instruction set in use.");
    m.def("isas", &isas, "The instruction sets of this machine, least first.");
    m.def("use_isa", &use_isa, nb::arg("name"), "Use another instruction set from now on.");
    threads_in_use();  // looks for them now: before a fork
    m.def("threads", &threads_in_use, "Whose threads the kernels share their work among.");
    m.def("has_exact_int8_dot", &has_exact_int8_dot);
    bind_plan(m);
    bind_linear(m);
    bind_producer(m);
    bind_columns(m);
    bind_gram(m);
    bind_attention(m);
}
