#include "kernel_choice.h"

#include <atomic>
#include <stdexcept>

namespace dobb::cpu {

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

void choose_kernel(const std::string& name) {
    for (const Kernel& candidate : all_kernels())
        if (name == candidate.name && candidate.supported()) {
            chosen.store(&candidate);
            return;
        }
    throw std::invalid_argument("no CPU kernel " + name + " on this processor");
}

}  // namespace dobb::cpu
