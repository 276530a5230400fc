// dobb::gram_ on NVIDIA GPUs.
#include "dobb/gram.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "gram.h"

namespace dobb {
namespace {

void gram_cuda(const at::Tensor& total, const at::Tensor& activations, std::int64_t width) {
    check_gram(total, activations, width);
    const auto type = activations.scalar_type();
    TORCH_CHECK_VALUE(type == at::kBFloat16 || type == at::kHalf, "dobb::gram_: activations is ", type,
                      ", expected bf16 or fp16 on a GPU; megatron_dobb.methods.dobb.kernels.gram_ takes others");
    if (activations.numel() == 0) return;
    const c10::cuda::CUDAGuard guard(activations.device());
    const cuda::Activations x = {activations.const_data_ptr(),
                                 type == at::kBFloat16 ? cuda::Type::kBf16 : cuda::Type::kFp16, activations.size(0),
                                 activations.stride(0), activations.size(1)};
    const cuda::GramPlan plan = cuda::plan_gram(x, width);
    const at::Tensor scratch =
        at::empty({static_cast<std::int64_t>(plan.scratch_bytes)}, activations.options().dtype(at::kByte));
    cuda::add_gram(total.mutable_data_ptr<float>(), x, width, plan, scratch.mutable_data_ptr(),
                   c10::cuda::getCurrentCUDAStream());
}

}  // namespace
}  // namespace dobb

TORCH_LIBRARY_IMPL(dobb, CUDA, library) { library.impl("gram_", dobb::gram_cuda); }
