// The Python module megatron_dobb._C. Importing it registers operators; each topic adds its own, and its functions.
#include <pybind11/pybind11.h>

#include "module.h"

#ifndef DOBB_CUDA_ARCHITECTURES
#define DOBB_CUDA_ARCHITECTURES ""
#endif

PYBIND11_MODULE(_C, module) {
    module.doc() = "Kernels of megatron_dobb; use megatron_dobb.methods.dobb.kernels";
    module.attr("torch_version") = DOBB_TORCH_VERSION;
    module.attr("compiler") = DOBB_COMPILER;
    module.attr("sources") = DOBB_SOURCES;  // as megatron_dobb/kernels/source_digest.py tells them
    module.attr("cuda_architectures") = DOBB_CUDA_ARCHITECTURES;  // empty without CUDA kernels
#ifdef _OPENMP
    module.attr("parallel") = true;
#else
    module.attr("parallel") = false;  // at::parallel_for is a plain loop
#endif
    for (const dobb::DefineFunctions define : dobb::module_functions()) define(module);
}
