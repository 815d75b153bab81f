// Whether a call may skip torch's dispatcher: asked before every launch of a module, so in one compiled function.
#pragma once
#include <nanobind/nanobind.h>

#include "tensor.hpp"

namespace baracuda {

class PlainCall {
    nanobind::object quiet_[3], level_, batched_, forward_ad_, current_level_, is_neg_, is_meta_;

    static bool is_false(PyObject* result) {  // takes the reference
        if (!result) throw nanobind::python_error();
        const int truth = PyObject_IsTrue(result);
        Py_DECREF(result);
        if (truth < 0) throw nanobind::python_error();
        return !truth;
    }

public:
    PlainCall() {
        namespace nb = nanobind;
        nb::object c = nb::module_::import_("torch").attr("_C"), functorch = c.attr("_functorch");
        quiet_[0] = c.attr("_len_torch_dispatch_stack");
        quiet_[1] = c.attr("_len_torch_function_stack");
        quiet_[2] = c.attr("_is_any_autocast_enabled");
        level_ = functorch.attr("maybe_current_level");
        batched_ = functorch.attr("is_legacy_batchedtensor");
        forward_ad_ = nb::module_::import_("torch.autograd.forward_ad");
        current_level_ = nb::steal(PyUnicode_InternFromString("_current_level"));
        is_neg_ = nb::steal(PyUnicode_InternFromString("is_neg"));
        is_meta_ = nb::steal(PyUnicode_InternFromString("is_meta"));
    }

    // No tracer, mode, transform, autocast or subclass sees a call on x, and it lies in memory as it is.
    bool operator()(PyObject* x) const {
        if (reinterpret_cast<PyObject*>(Py_TYPE(x)) != torch.tensor) return false;
        for (const nanobind::object& count : quiet_)
            if (!is_false(PyObject_CallNoArgs(count.ptr()))) return false;
        nanobind::object level = nanobind::steal(PyObject_CallNoArgs(level_.ptr()));
        if (!level.is_valid()) throw nanobind::python_error();
        if (!level.is_none()) return false;
        nanobind::object tangents = nanobind::steal(PyObject_GetAttr(forward_ad_.ptr(), current_level_.ptr()));
        if (!tangents.is_valid()) throw nanobind::python_error();
        if (PyLong_AsLong(tangents.ptr()) >= 0) return false;
        return is_false(PyObject_CallMethodNoArgs(x, is_neg_.ptr())) && is_false(PyObject_GetAttr(x, is_meta_.ptr())) &&
               is_false(PyObject_CallOneArg(batched_.ptr(), x));
    }
};

}  // namespace baracuda
