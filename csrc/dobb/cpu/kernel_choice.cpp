#include "kernel_choice.h"

#include <atomic>
#include <stdexcept>

#include "kernel_check.h"

namespace dobb::cpu {
namespace {

const Kernel& plain_kernel() { return all_kernels().back(); }

struct Choice {
    const Kernel* kernel;
    std::vector<std::string> rejected;
};

Choice choose() {
    std::vector<std::string> rejected;
    for (const Kernel& candidate : all_kernels()) {
        if (!candidate.supported()) continue;
        if (&candidate == &plain_kernel() || agree(candidate, plain_kernel())) return {&candidate, rejected};
        rejected.emplace_back(candidate.name);
    }
    throw std::logic_error("no kernel for this processor");  // the plain one runs everywhere
}

// Made once in a process, by the thread that asks first while others wait.
const Choice& choice() {
    static const Choice made = choose();
    return made;
}

std::atomic<const Kernel*> of_test{nullptr};

}  // namespace

const Kernel& kernel_in_use() {
    const Kernel* found = of_test.load(std::memory_order_relaxed);
    return found ? *found : *choice().kernel;
}

bool kernel_in_use_was_checked() { return &kernel_in_use() != &plain_kernel(); }

std::vector<std::string> rejected_kernels() { return choice().rejected; }

std::vector<std::string> supported_kernels() {
    std::vector<std::string> names;
    for (const Kernel& candidate : all_kernels())
        if (candidate.supported()) names.emplace_back(candidate.name);
    return names;
}

void choose_kernel(const std::string& name) {
    for (const Kernel& candidate : all_kernels())
        if (name == candidate.name && candidate.supported()) {
            if (&candidate != &plain_kernel() && !agree(candidate, plain_kernel()))
                throw std::invalid_argument("CPU kernel " + name + " gives other results than the plain one");
            of_test.store(&candidate);
            return;
        }
    throw std::invalid_argument("no CPU kernel " + name + " on this processor");
}

}  // namespace dobb::cpu
