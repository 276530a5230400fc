// dobb::gram_: sums of x_j x_j^T over tokens, for every block of features. Checks, shared by all devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dobb {

// Throws c10::Error (ValueError in Python) with a message that names the tensor, what it is and what was expected.
void check_gram(const at::Tensor& total, const at::Tensor& activations, std::int64_t width);

}  // namespace dobb
