#include "gram.h"

#include <torch/library.h>

namespace dobb {
namespace {

void gram_meta(const at::Tensor& total, const at::Tensor& activations, std::int64_t width) {
    const auto symbolic = [](const at::Tensor& x) { return x.unsafeGetTensorImpl()->has_symbolic_sizes_strides(); };
    if (!symbolic(total) && !symbolic(activations)) check_gram(total, activations, width);
}

}  // namespace

void check_gram(const at::Tensor& total, const at::Tensor& activations, std::int64_t width) {
    TORCH_CHECK_VALUE(
        activations.dim() == 2 && (activations.numel() == 0 || activations.size(1) == 1 || activations.stride(1) == 1),
        "dobb::gram_: activations has shape ", activations.sizes(), " and strides ", activations.strides(),
        ", expected [tokens, features] with neighbouring features");
    const auto type = activations.scalar_type();
    TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "dobb::gram_: activations is ",
                      type, ", expected fp32, bf16 or fp16");
    TORCH_CHECK_VALUE(width >= 1 && activations.size(1) % width == 0, "dobb::gram_: width is ", width,
                      ", expected a divisor of the ", activations.size(1), " features of activations");
    const std::int64_t blocks = activations.size(1) / width;
    TORCH_CHECK_VALUE(total.scalar_type() == at::kFloat && total.is_contiguous() &&
                          total.sizes() == at::IntArrayRef({blocks, width, width}),
                      "dobb::gram_: total is ", total.scalar_type(), " ", total.sizes(), ", expected contiguous fp32 [",
                      blocks, ", ", width, ", ", width, "]");
    TORCH_CHECK_VALUE(total.device() == activations.device(), "dobb::gram_: total is on ", total.device(),
                      ", expected ", activations.device(), ", like activations");
}

}  // namespace dobb

TORCH_LIBRARY_IMPL(dobb, Meta, library) { library.impl("gram_", dobb::gram_meta); }
