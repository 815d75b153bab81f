#include "isa.hpp"

namespace baracuda {

#if defined(__x86_64__)
extern const Kernels kernels_sse2, kernels_avx2, kernels_avx512;
extern const LinearKernels linears_sse2, linears_avx2, linears_avxvnni, linears_avx512, linears_avx512vnni;

const std::vector<Isa>& compiled_isas() {
    static const std::vector<Isa> all = [] {
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        const bool avx512vnni = avx512 && __builtin_cpu_supports("avx512vnni");
#if defined(BARACUDA_NARROW)  // the tests run the code for AVX-VNNI with the instructions of AVX512-VNNI
        const bool avxvnni = avx512vnni;
#else
        const bool avxvnni = avx2 && __builtin_cpu_supports("avxvnni");
#endif
        return std::vector<Isa>{
            {"sse2", true, &kernels_sse2, &linears_sse2},
            {"avx2", avx2, &kernels_avx2, &linears_avx2},
            {"avxvnni", avxvnni, &kernels_avx2, &linears_avxvnni},
            {"avx512", avx512, &kernels_avx512, &linears_avx512},
            {"avx512vnni", avx512vnni, &kernels_avx512, &linears_avx512vnni},
        };
    }();
    return all;
}
#else
extern const Kernels kernels_native;
extern const LinearKernels linears_native;

const std::vector<Isa>& compiled_isas() {
    static const std::vector<Isa> all{{"native", true, &kernels_native, &linears_native}};
    return all;
}
#endif

}  // namespace baracuda
