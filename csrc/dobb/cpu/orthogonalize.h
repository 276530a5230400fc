// Orthonormal bases of one block on a CPU by Cholesky QR, put together from PyTorch's own products and LAPACK.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace dobb {

// Constants that megatron_dobb/methods/dobb/orthogonalize.py states and explains.
constexpr float kMaxError = 1e-5f, kDamping = 1e-5f, kShiftPerColumn = 1e-7f;

// One more pass than in megatron_dobb/methods/dobb/orthogonalize.py, for blocks of nearly equal features; others stop
// before.
constexpr int kCholeskyPasses = 4;

// From this width on, the work inside a block is shared out to the threads as well.
constexpr std::int64_t kWideBlock = 512;

// Q <- orth(A Q) by Cholesky QR, for A and Q [b, b], contiguous fp32 tensors of their own storage; `basis` is replaced
// by the result. False, and a basis not to be used, where it broke down or misses kMaxError. The bits depend on A and Q
// alone, not on the number of threads.
bool iterate_cholesky(const at::Tensor& damped, at::Tensor& basis);

// Calls range(begin, end) for ranges of the blocks, on as many threads as there are. Inside, linear algebra runs on one
// thread, unless there are fewer wide blocks than threads.
void for_each_block(std::int64_t blocks, std::int64_t width, c10::function_ref<void(std::int64_t, std::int64_t)> range);

}  // namespace dobb
