// The operands of a CPU kernel: addresses, types and distances between rows, read from torch's tensors in one go.
#pragma once
#include <cstdlib>

#include "checks.hpp"
#include "torch.hpp"

namespace baracuda {

// The code of a float type; -1 for any other.
inline int float_code(DLDataType type) {
    if (type.code == 4) return BF16;
    if (type.code != 2) return -1;
    return type.bits == 16 ? F16 : type.bits == 32 ? F32 : F64;
}

struct Operand {
    PyObject* value = Py_None;
    bool is_tensor = false;
    uint64_t address = 0;   // 0 where it is no tensor
    int code = F32;         // of a tensor: its float type, or -1
    int64_t pitch = DENSE;  // between the rows of a matrix
    DLTensor tensor{};

    explicit operator bool() const { return value != Py_None; }

    // The number it is, or that a tensor without axes holds.
    double number() const {
        if (is_tensor && word(tensor.dtype) == word({2, 32, 1})) return *reinterpret_cast<const float*>(address);
        if (is_tensor && word(tensor.dtype) == word({0, 32, 1})) return *reinterpret_cast<const int32_t*>(address);
        const double number = PyFloat_AsDouble(value);
        if (number == -1 && PyErr_Occurred()) throw nanobind::python_error();
        return number;
    }
};

// In the order of the op's row. Python has checked them: rows are dense, and evenly spaced.
class Operands {
    PyObject* tuple_;

public:
    Operands(nanobind::handle operands, Py_ssize_t count) : tuple_(tuple_of(operands)) {
        require(PyTuple_GET_SIZE(tuple_) == count, "an operand for each entry of the op's row");
    }

    Operand operator[](Py_ssize_t i) const {
        Operand operand;
        if (i < 0) return operand;
        operand.value = PyTuple_GET_ITEM(tuple_, i);
        if (!operand || PyFloat_CheckExact(operand.value) || PyLong_CheckExact(operand.value)) return operand;
        DLTensor& tensor = operand.tensor;
        if (!torch.read(operand.value, tensor)) throw nanobind::python_error();
        require(tensor.device.type == 1, "tensors in the CPU's memory");
        operand.is_tensor = true;
        operand.address = address_of(tensor), operand.code = float_code(tensor.dtype);
        if (!is_contiguous(tensor)) operand.pitch = row_pitch(tensor);
        return operand;
    }

private:
    static int64_t row_pitch(const DLTensor& tensor) {
        for (int i = tensor.ndim - 2; i >= 0; --i)
            if (tensor.shape[i] != 1) return tensor.strides[i];
        return DENSE;
    }
};

// Memory of one thread, for workspaces that the caller does not bring.
class Scratch {
    char* data_ = nullptr;
    int64_t size_ = 0;

public:
    ~Scratch() { free(data_); }
    uint64_t of(int64_t size) {
        if (size > size_) {
            free(data_);
            size_ = (size + 4095) / 4096 * 4096;
            data_ = static_cast<char*>(aligned_alloc(64, size_));
            if (!data_) size_ = 0, refuse("no memory for a workspace of " + std::to_string(size) + " bytes");
        }
        return reinterpret_cast<uint64_t>(data_);
    }
};

// Where a workspace of so many bytes begins: a tensor's memory, or the thread's own where that is None.
inline uint64_t workspace_of(nanobind::handle workspace, int64_t size) {
    static thread_local Scratch scratch;
    if (workspace.is_none()) return size ? scratch.of(size) : 0;
    DLTensor tensor;
    if (!torch.read(workspace.ptr(), tensor)) throw nanobind::python_error();
    return address_of(tensor);
}

// As many threads as torch would use, where there is work for more than one.
inline int64_t threads_for(int64_t elements) {
    if (elements < SMALL) return 1;
    nanobind::object count = nanobind::steal(PyObject_CallNoArgs(torch.get_num_threads));
    if (!count.is_valid()) throw nanobind::python_error();
    const int64_t threads = nanobind::cast<int64_t>(count);
    return threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
}

}  // namespace baracuda
