// The quick answer to "do these operands fit?". It says yes or "perhaps not"; Python finds out why, and for whom.
#pragma once
#include <string>
#include <vector>

#include "tensor.hpp"

namespace baracuda {

// One operand: its dtypes as words, its shape, and the numbers ('f' or 'i', or none) that may stand for it.
struct Rule {
    std::vector<uint32_t> dtypes;
    std::vector<int64_t> shape;
    bool output, optional;
    char number;
    double low, high;

    // along: other axes may stand for the rows of a matrix.
    bool takes(const DLTensor& tensor, bool along) const {
        bool known = false;
        for (uint32_t dtype : dtypes) known |= dtype == word(tensor.dtype);
        if (!known) return false;
        if (size_t(tensor.ndim) != shape.size()) {
            if (!along || shape.size() != 2 || !tensor.ndim || tensor.shape[tensor.ndim - 1] != shape[1]) return false;
            int64_t rows = 1;
            for (int i = 0; i < tensor.ndim - 1; ++i) rows *= tensor.shape[i];
            return rows == shape[0];
        }
        for (size_t i = 0; i < shape.size(); ++i)
            if (tensor.shape[i] != shape[i]) return false;
        return true;
    }

    bool takes_number(PyObject* value) const {
        if (PyFloat_CheckExact(value)) {
            const double x = PyFloat_AS_DOUBLE(value);
            return number == 'f' && low < x && x < high;
        }
        int overflow = 0;
        const long long x = PyLong_AsLongLongAndOverflow(value, &overflow);
        const bool exact = !overflow && x > -(1LL << 53) && x < 1LL << 53;
        return number && exact && low < double(x) && double(x) < high;
    }
};

class Checker {
    std::vector<Rule> rules_;
    DLDevice device_;
    bool elementwise_, rows_;

public:
    // rows: whether inputs may be matrices with any distance between their rows.
    Checker(std::vector<Rule> rules, DLDevice device, bool elementwise, bool rows)
        : rules_(std::move(rules)), device_(device), elementwise_(elementwise), rows_(rows) {}

    // Whether all of the given operands, which may be the first ones only, are plain, contiguous, of the row's shapes
    // and dtypes, on the device, and no output shares memory it must not share. Inputs in spaced rows are taken only
    // without outputs: what memory those share is not looked at. `along`: a contiguous tensor with other axes in place of
    // its rows is as good as a matrix.
    bool fits(PyObject* operands, bool along = false) const {
        const Py_ssize_t count = PyTuple_GET_SIZE(operands);
        if (count > Py_ssize_t(rules_.size()) || count > MOST) return false;
        DLTensor tensors[MOST];
        bool has_memory[MOST], spaced = false;
        for (Py_ssize_t i = 0; i < count; ++i) {
            PyObject* value = PyTuple_GET_ITEM(operands, i);
            const Rule& rule = rules_[i];
            has_memory[i] = torch.is_plain(value);
            if (has_memory[i]) {
                if (!read(value, tensors[i]) || !rule.takes(tensors[i], along)) return false;
                if (!is_contiguous(tensors[i])) {
                    if (!rows_ || rule.output || !has_dense_rows(tensors[i])) return false;
                    spaced = true;
                }
            } else if (value == Py_None) {
                if (!rule.optional) return false;
            } else if (!(PyFloat_CheckExact(value) || PyLong_CheckExact(value)) || !rule.takes_number(value)) {
                return false;
            }
        }
        for (Py_ssize_t i = 0; i < count; ++i) {
            if (!rules_[i].output || !has_memory[i]) continue;
            if (spaced) return false;
            for (Py_ssize_t j = 0; j < count; ++j)
                if (i != j && has_memory[j] && !may_share(tensors[i], tensors[j])) return false;
        }
        return true;
    }

    // Whether the workspace is a plain, contiguous tensor on the device with room for `size` bytes, aligned, that shares
    // no memory with an operand.
    bool holds(PyObject* workspace, PyObject* operands, uint64_t size, uint64_t alignment) const {
        DLTensor room, other;
        if (!torch.is_plain(workspace) || !read(workspace, room) || !is_contiguous(room) || bytes_of(room) < size ||
            address_of(room) % alignment)
            return false;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(operands); ++i) {
            PyObject* value = PyTuple_GET_ITEM(operands, i);
            if (value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value)) continue;
            if (!torch.is_plain(value) || !read(value, other) || !is_contiguous(other) || meet(room, other)) return false;
        }
        return true;
    }

private:
    bool read(PyObject* value, DLTensor& out) const {
        if (!torch.read(value, out)) {
            PyErr_Clear();
            return false;
        }
        // A freed storage is at no address, or at the tensor's offset from none.
        const bool is_there = address_of(out) >= 4096 || !bytes_of(out);
        return is_there && out.device.type == device_.type && out.device.index == device_.index;
    }

    static bool has_dense_rows(const DLTensor& tensor) {
        return tensor.ndim == 2 && tensor.strides && tensor.strides[0] >= 0 && tensor.strides[1] == 1;
    }

    // Whether two contiguous tensors share memory.
    static bool meet(const DLTensor& a, const DLTensor& b) {
        return address_of(b) < address_of(a) + bytes_of(a) && address_of(a) < address_of(b) + bytes_of(b);
    }

    // An output may be one of the inputs of an elementwise op, and otherwise shares memory with nothing.
    bool may_share(const DLTensor& out, const DLTensor& other) const {
        if (!meet(out, other)) return true;
        if (!elementwise_ || address_of(out) != address_of(other) || word(out.dtype) != word(other.dtype) || out.ndim != other.ndim)
            return false;
        for (int i = 0; i < out.ndim; ++i)
            if (out.strides[i] != other.strides[i] || out.shape[i] != other.shape[i]) return false;
        return true;
    }
};

}  // namespace baracuda
