// Holds a variant of the CPU kernels against the plain one. Without PyTorch.
#pragma once

#include "kernel.h"

namespace dobb::cpu {

// Whether both give the same results for one tiny block, by every function of the kernels: the update's sums and those
// of x x^T bit for bit, what Householder's reflections round up to rounding. Takes well under a millisecond.
bool agree(const Kernel& kernel, const Kernel& plain);

}  // namespace dobb::cpu
