// The few functions of the CUDA driver that launching takes, found at run time: building needs no CUDA, importing no
// driver.
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace baracuda {

// The driver's 128 bytes that tell the copy engine where a matrix lies.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// How the driver is told of a launch: its own layout.
struct LaunchAttribute {
    enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
    int id, padding;
    int value[16];
};

struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void* stream;
    LaunchAttribute* attributes;
    unsigned attribute_count;
};

class Driver {
    int (*error_string_)(int, const char**);

public:
    int version = 0;  // of CUDA, the newest the driver knows: 12030 is 12.3
    int (*device_get)(int* device, int ordinal);
    int (*context_device)(int* device);
    int (*primary_context_retain)(void** context, int device);
    int (*context_set_current)(void* context);
    int (*launch_kernel)(const LaunchConfig* config, void* function, void** parameters, void** extra);
    int (*encode_tiled)(TensorMap* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                        const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                        int swizzle, int promotion, int fill);

    explicit Driver(const std::string& name) {
        void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) throw std::runtime_error("the CUDA driver cannot be loaded: " + std::string(dlerror()));
        find(library, "cuGetErrorString", error_string_);
        int (*driver_version)(int* version);
        find(library, "cuDriverGetVersion", driver_version);
        require(driver_version(&version), "cuDriverGetVersion");
        find(library, "cuDeviceGet", device_get);
        find(library, "cuCtxGetDevice", context_device);
        find(library, "cuDevicePrimaryCtxRetain", primary_context_retain);
        find(library, "cuCtxSetCurrent", context_set_current);
        find(library, "cuLaunchKernelEx", launch_kernel);
        // Only kernels for the copy engine need it, and they run where the driver has it.
        encode_tiled = reinterpret_cast<decltype(encode_tiled)>(dlsym(library, "cuTensorMapEncodeTiled"));
    }

    void require(int result, const std::string& what) const {
        if (result == 0) return;
        const char* text = nullptr;
        error_string_(result, &text);
        throw std::runtime_error(what + ": " + (text ? text : "unknown error") + " (CUDA error " +
                                 std::to_string(result) + ")");
    }

private:
    template <class Function>
    static void find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (!function) throw std::runtime_error("the CUDA driver has no " + std::string(name) + "; update it");
    }
};

}  // namespace baracuda
