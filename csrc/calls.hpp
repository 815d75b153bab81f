// A call of a module: its plan by the input's shape, and the plan's computation, without Python in between.
#pragma once
#include <utility>
#include <vector>

#include "checker.hpp"
#include "plain.hpp"
#include "torch.hpp"

namespace baracuda {

inline nanobind::object called(PyObject* result) {
    if (!result) throw nanobind::python_error();
    return nanobind::steal(result);
}

// Check the inputs, make the outputs, launch.
class Computation {
    nanobind::object checker_, launch_, workspace_;
    std::vector<nanobind::object> makers_;
    const Checker* rules_;
    bool along_;

public:
    // A maker is called for each output, and one for the workspace; None makes none.
    Computation(nanobind::object checker, bool along, nanobind::tuple makers, nanobind::object workspace,
                nanobind::object launch)
        : checker_(checker), launch_(std::move(launch)), workspace_(std::move(workspace)),
          rules_(nanobind::cast<const Checker*>(checker)), along_(along) {
        for (nanobind::handle maker : makers) makers_.push_back(nanobind::borrow(maker));
    }

    // The outputs; None, and nothing is done, where the inputs may not fit.
    nanobind::object compute(nanobind::handle given) const {
        PyObject* inputs = tuple_of(given);
        if (!rules_->fits(inputs, along_)) return nanobind::none();
        const Py_ssize_t count = PyTuple_GET_SIZE(inputs), made = Py_ssize_t(makers_.size());
        nanobind::object outputs = called(PyTuple_New(made)), operands = called(PyTuple_New(count + made));
        for (Py_ssize_t i = 0; i < count; ++i) put(operands, i, PyTuple_GET_ITEM(inputs, i));
        for (Py_ssize_t i = 0; i < made; ++i) {
            nanobind::object output = made_by(makers_[i]);
            put(outputs, i, output.ptr()), put(operands, count + i, output.ptr());
        }
        nanobind::object room = made_by(workspace_);
        PyObject* arguments[] = {operands.ptr(), room.ptr()};
        called(PyObject_Vectorcall(launch_.ptr(), arguments, 2, nullptr));
        return outputs;
    }

private:
    static void put(nanobind::object& tuple, Py_ssize_t i, PyObject* value) {
        Py_INCREF(value);
        PyTuple_SET_ITEM(tuple.ptr(), i, value);
    }

    static nanobind::object made_by(const nanobind::object& maker) {
        return maker.is_none() ? nanobind::none() : called(PyObject_CallNoArgs(maker.ptr()));
    }
};

// What a module keeps for each kind of input, as long as its own tensors are those it was found for.
class Lookup {
    struct Found {
        uint32_t dtype;
        DLDevice device;
        std::vector<int64_t> shape;
        nanobind::object tag, value;

        bool is_for(const DLTensor& x, PyObject* wanted) const {
            if (tag.ptr() != wanted || dtype != word(x.dtype) || device.type != x.device.type ||
                device.index != x.device.index || shape.size() != size_t(x.ndim))
                return false;
            for (size_t i = 0; i < shape.size(); ++i)
                if (shape[i] != x.shape[i]) return false;
            return true;
        }
    };
    struct Tensor {
        nanobind::object name, value;
        uint64_t address = 0;
        uint32_t dtype = 0;
    };
    const PlainCall& plain_;
    nanobind::object is_grad_enabled_;
    std::vector<Tensor> tensors_;
    Tensor bias_;
    std::vector<Found> found_;

public:
    explicit Lookup(const PlainCall& plain)
        : plain_(plain), is_grad_enabled_(nanobind::module_::import_("torch").attr("is_grad_enabled")) {
        bias_.value = nanobind::none();
    }

    // Start over with these tensors: what is added from now on belongs to them.
    void take(nanobind::dict tensors, nanobind::object bias) {
        found_.clear(), tensors_.clear();
        for (auto [name, value] : tensors) tensors_.push_back(seen(nanobind::borrow(name), nanobind::borrow(value)));
        bias_ = seen(nanobind::none(), std::move(bias));
    }

    void add(nanobind::handle x, nanobind::object tag, nanobind::object value, size_t most) {
        DLTensor tensor;
        if (!torch.read(x.ptr(), tensor)) return PyErr_Clear();
        if (found_.size() >= most) found_.clear();
        std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.ndim);
        found_.push_back({word(tensor.dtype), tensor.device, std::move(shape), std::move(tag), std::move(value)});
    }

    // What was added for inputs like x and this tag; None where nothing was, where a tensor is another one than before,
    // where gradients may be wanted, or where the call must not skip torch's dispatcher.
    nanobind::object find(nanobind::handle x, nanobind::handle tensors, nanobind::handle bias, nanobind::handle tag) const {
        DLTensor tensor;
        if (found_.empty() || !plain_(x.ptr()) || called(PyObject_CallNoArgs(is_grad_enabled_.ptr())).ptr() != Py_False)
            return nanobind::none();
        for (const Tensor& known : tensors_)
            if (!is_same(known, PyDict_GetItem(tensors.ptr(), known.name.ptr()))) return nanobind::none();
        if (!is_same(bias_, bias.ptr())) return nanobind::none();
        if (!torch.read(x.ptr(), tensor)) {
            PyErr_Clear();
            return nanobind::none();
        }
        for (const Found& found : found_)
            if (found.is_for(tensor, tag.ptr())) return found.value;
        return nanobind::none();
    }

private:
    static Tensor seen(nanobind::object name, nanobind::object value) {
        Tensor tensor{std::move(name), std::move(value)};
        DLTensor read;
        if (tensor.value.is_none()) return tensor;
        if (!torch.read(tensor.value.ptr(), read)) throw nanobind::python_error();
        tensor.address = address_of(read), tensor.dtype = word(read.dtype);
        return tensor;
    }

    // The same object, and what it holds was not assigned anew.
    static bool is_same(const Tensor& known, PyObject* value) {
        if (known.value.ptr() != value) return false;
        if (value == Py_None) return true;
        DLTensor read;
        if (!torch.read(value, read)) {
            PyErr_Clear();
            return false;
        }
        return known.address == address_of(read) && known.dtype == word(read.dtype);
    }
};

}  // namespace baracuda
