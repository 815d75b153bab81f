// The instruction sets: which of the compiled tables this processor can run, and which one is in use.
#pragma once
#include <string>
#include <vector>

#include "job.hpp"

namespace baracuda {

struct Isa {
    const char* name;
    bool runs_here;
    const Kernels* kernels;
    const LinearKernels* linears;
};

// All that were compiled, least first.
const std::vector<Isa>& compiled_isas();

}  // namespace baracuda
