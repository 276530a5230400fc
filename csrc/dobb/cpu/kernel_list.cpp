#include "common/cpu/target.h"
#include "kernel.h"

namespace dobb::cpu {

extern const Kernel kPlainKernel;
#ifdef DOBB_X86
extern const Kernel kAvx2Kernel, kAvx512Kernel, kAvx512Bf16Kernel, kAmxKernel;
#endif

const std::vector<Kernel>& all_kernels() {
    static const std::vector<Kernel> kernels = {
#ifdef DOBB_X86
        kAmxKernel,   kAvx512Bf16Kernel, kAvx512Kernel, kAvx2Kernel,
#endif
        kPlainKernel,
    };
    return kernels;
}

}  // namespace dobb::cpu
