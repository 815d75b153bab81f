// Compiled once per instruction set, as kernels.cpp is.
#include "few_rows.hpp"
#include "linear.hpp"

namespace baracuda {

extern const LinearKernels BARACUDA_TABLE;
const LinearKernels BARACUDA_TABLE = {weight_sums, unpack_rows, shift_rows, epilogue, prepare, multiply};

}  // namespace baracuda
