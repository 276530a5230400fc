// The compiled variants of the kernels, and the choice of one.
#include "kernels.h"

#include <atomic>
#include <stdexcept>

#include "common/cpu/target.h"
#include "update_task.h"

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

namespace {

std::atomic<const Kernel*> chosen{nullptr};

}  // namespace

const Kernel& kernel_in_use() {
    if (const Kernel* found = chosen.load()) return *found;
    for (const Kernel& candidate : all_kernels())
        if (candidate.supported()) {
            chosen.store(&candidate);
            return candidate;
        }
    throw std::logic_error("no kernel for this processor");  // the plain one runs everywhere
}

std::vector<std::string> supported_kernels() {
    std::vector<std::string> names;
    for (const Kernel& candidate : all_kernels())
        if (candidate.supported()) names.emplace_back(candidate.name);
    return names;
}

std::string chosen_kernel() { return kernel_in_use().name; }

void choose_kernel(const std::string& name) {
    for (const Kernel& candidate : all_kernels())
        if (name == candidate.name && candidate.supported()) {
            chosen.store(&candidate);
            return;
        }
    throw std::invalid_argument("no CPU kernel " + name + " on this processor");
}

}  // namespace dobb::cpu
