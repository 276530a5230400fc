// The variant of the CPU kernels in use.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace dobb::cpu {

// The fastest variant that this processor runs and that agrees with the plain one, which the first call checks; or the
// one that a test chose.
const Kernel& kernel_in_use();

// Whether it was held against the plain one; false where it is the plain one.
bool kernel_in_use_was_checked();

// Names of the compiled variants that this processor runs, the fastest first.
std::vector<std::string> supported_kernels();

// Names of those that are passed over, because they do not agree with the plain one.
std::vector<std::string> rejected_kernels();

// Tests compare variants with it. Throws std::invalid_argument for a variant that this processor does not run, or that
// does not agree with the plain one.
void choose_kernel(const std::string& name);

}  // namespace dobb::cpu
