// The CPU kernel in use, for build_info() and for tests.
#pragma once

#include <string>
#include <vector>

namespace dobb::cpu {

// Names of the compiled variants that this processor runs, the fastest first.
std::vector<std::string> supported_kernels();

std::string chosen_kernel();

// Tests compare variants with it. Throws std::invalid_argument for a variant that this processor does not run.
void choose_kernel(const std::string& name);

}  // namespace dobb::cpu
