// Torch's tensors as DLPack describes them. The standard fixes these layouts, so no header of torch is needed, and
// torch hands out a table of functions that fill them in: one call reads address, shape, strides, dtype and device.
#pragma once
#include <Python.h>

#include <cstdint>

namespace baracuda {

struct DLDevice {
    int32_t type, index;
};

struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct DLExchange {
    uint32_t major, minor;
    DLExchange* previous;
    void* owning[3];
    int (*read)(void* object, DLTensor* out);
    int (*current_stream)(int32_t device_type, int32_t device_index, void** out);
};

constexpr int32_t CUDA = 2;
// The most operands of an operation, or arguments of a kernel.
constexpr int MOST = 24;

// A dtype as one number. Never 0 or 1.
inline uint32_t word(DLDataType type) { return uint32_t(type.lanes) << 16 | uint32_t(type.bits) << 8 | type.code; }

inline uint64_t address_of(const DLTensor& tensor) {
    return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
}

inline bool is_contiguous(const DLTensor& tensor) {
    int64_t expected = 1;
    bool dense = true;
    for (int i = tensor.ndim - 1; i >= 0; --i) {
        if (tensor.shape[i] == 0) return true;
        if (tensor.shape[i] != 1 && tensor.strides[i] != expected) dense = false;
        expected *= tensor.shape[i];
    }
    return dense;
}

inline uint64_t bytes_of(const DLTensor& contiguous) {
    uint64_t bytes = (contiguous.dtype.bits * contiguous.dtype.lanes + 7) / 8;
    for (int i = 0; i < contiguous.ndim; ++i) bytes *= uint64_t(contiguous.shape[i]);
    return bytes;
}

// torch's side, found when the module is imported.
struct Torch {
    DLExchange* exchange = nullptr;
    PyObject *tensor = nullptr, *parameter = nullptr, *get_num_threads = nullptr;

    // Neither a subclass, which may see things differently, nor anything else.
    bool is_plain(PyObject* value) const {
        PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
        return type == tensor || type == parameter;
    }

    // Sets Python's error where there is no dense memory to describe.
    bool read(PyObject* value, DLTensor& out) const { return exchange->read(value, &out) == 0; }
};

extern Torch torch;

}  // namespace baracuda
