// What a compiled module finds of torch when it is imported.
#pragma once
#include <nanobind/nanobind.h>

#include "tensor.hpp"

namespace baracuda {

inline void find_torch() {
    namespace nb = nanobind;
    nb::object module = nb::module_::import_("torch"), tensor = module.attr("Tensor");
    nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
    if (capsule.is_none())
        throw nb::import_error("torch has no DLPack exchange API; baracuda needs torch 2.10 or later");
    auto* exchange = static_cast<DLExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!exchange) throw nb::python_error();
    while (exchange && exchange->major != 1) exchange = exchange->previous;
    if (!exchange || !exchange->read) throw nb::import_error("torch's DLPack exchange API is of an unknown version");
    torch.exchange = exchange;
    // Held for as long as the process lives.
    torch.tensor = tensor.release().ptr();
    torch.parameter = nb::object(nb::module_::import_("torch.nn").attr("Parameter")).release().ptr();
    torch.get_num_threads = nb::object(module.attr("get_num_threads")).release().ptr();
}

inline PyObject* tuple_of(nanobind::handle operands) {
    if (!PyTuple_CheckExact(operands.ptr())) throw nanobind::type_error("expected the operands in a tuple");
    return operands.ptr();
}

}  // namespace baracuda
