// Functions of megatron_dobb._C: the variant of the CPU kernels, for build_info() and for tests.
#include <pybind11/stl.h>

#include "common/module.h"
#include "kernel_choice.h"

namespace dobb::cpu {

static const ModuleFunctions kKernelFunctions([](pybind11::module_& module) {
    module.def("supported_cpu_kernels", &supported_kernels);
    module.def("chosen_cpu_kernel", [] { return kernel_in_use().name; });
    module.def("chosen_cpu_kernel_was_checked", &kernel_in_use_was_checked);
    module.def("rejected_cpu_kernels", &rejected_kernels);
    module.def("choose_cpu_kernel", &choose_kernel);
});

}  // namespace dobb::cpu
