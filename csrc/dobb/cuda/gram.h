// Launches the sums of x_j x_j^T on a GPU. Without PyTorch and without CUDA's headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dobb::cuda {

enum class Type { kBf16, kFp16 };

// The activations of one layer: x [tokens, features] with `row_stride` entries from one token to the next.
struct Activations {
    const void* data;
    Type type;
    std::int64_t tokens, row_stride, features;
};

// How the work is shared out on the current device. The sums depend on it in their last bits, and it on the device.
struct GramPlan {
    std::int64_t tiles;            // of all blocks' lower triangles
    std::int64_t parts;            // of the tokens
    std::int64_t tokens_in_part;   // at most
    std::int64_t tiles_at_a_time;  // as many as scratch memory holds
    std::size_t scratch_bytes;     // aligned to 4
};
GramPlan plan_gram(const Activations& x, std::int64_t width);

// total [features / width, width, width] += sum over tokens of x_j x_j^T. Both triangles receive the sum of the lower
// one. `stream` is a cudaStream_t.
void add_gram(float* total, const Activations& x, std::int64_t width, const GramPlan& plan, void* scratch,
              void* stream);

}  // namespace dobb::cuda
