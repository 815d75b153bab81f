// Compiled once per instruction set, as kernels.cpp is.
#include "weight_only.hpp"

namespace baracuda {

extern const LinearKernels BARACUDA_TABLE;
const LinearKernels BARACUDA_TABLE = {weight_sums, unpack_rows, shift_rows,     epilogue,
                                      prepare,     multiply,    prepare_floats, multiply_floats};

}  // namespace baracuda
