// The variant of the CPU kernels in use.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace dobb::cpu {

// The fastest variant that this processor runs, or the one that a test chose.
const Kernel& kernel_in_use();

// Names of the compiled variants that this processor runs, the fastest first.
std::vector<std::string> supported_kernels();

// Tests compare variants with it. Throws std::invalid_argument for a variant that this processor does not run.
void choose_kernel(const std::string& name);

}  // namespace dobb::cpu
