// Orthonormal bases of one block on a CPU: Householder reflections and Cholesky QR, put together from PyTorch's own
// products and LAPACK.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace dobb {

// Constants that megatron_dobb/orthogonalize.py states and explains.
constexpr float kMaxError = 1e-5f, kDamping = 1e-5f, kShiftPerColumn = 1e-7f;

// One more pass than in megatron_dobb/orthogonalize.py, for blocks of nearly equal features; others stop before.
constexpr int kCholeskyPasses = 4;

// From this width on, the work inside a block is shared out to the threads as well.
constexpr std::int64_t kWideBlock = 512;

// orth(A Q) [b, b], in any layout, by Householder reflections. A is contiguous fp32 of its own storage, and Q such a
// tensor or a result of this. The bits depend on A and Q alone, not on the number of threads.
at::Tensor iterate_householder(const at::Tensor& scaled, const at::Tensor& basis);

// The same by Cholesky QR; `basis` is replaced by the result. False, and a basis not to be used, where it broke down or
// misses kMaxError.
bool iterate_cholesky(const at::Tensor& damped, at::Tensor& basis);

// Calls block(j) for j = 0 .. blocks - 1, on as many threads as there are. Inside, linear algebra runs on one thread.
void for_each_block(std::int64_t blocks, std::int64_t width, c10::function_ref<void(std::int64_t)> block);

}  // namespace dobb
