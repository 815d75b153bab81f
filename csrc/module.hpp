// The parts of the module baracuda._cpu.
#pragma once
#include <nanobind/nanobind.h>

#include "isa.hpp"

namespace baracuda {

extern const Isa* isa;  // the one in use

void bind_plan(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_producer(nanobind::module_& m);
void bind_columns(nanobind::module_& m);
void bind_gram(nanobind::module_& m);
void bind_attention(nanobind::module_& m);

}  // namespace baracuda
