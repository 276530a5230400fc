// dobb::gram_ on a CPU: blocks, and rows of wide ones, shared out to the threads.
#include "dobb/gram.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>

#include "kernel_choice.h"

namespace dobb::cpu {
namespace {

// Tokens whose products add up in registers before they enter the sum; they bound its error and the scratch memory.
constexpr std::int64_t kTokensAtATime = 128;

// Rows `first_row .. last_row` of one block.
void add_rows(const Kernel& kernel, const at::Tensor& activations, std::int64_t block, std::int64_t width,
              std::int64_t first_row, std::int64_t last_row, float* scratch, float* total) {
    const bool is_bf16 = activations.scalar_type() == at::kBFloat16;
    const std::int64_t row_stride = activations.stride(0);
    for (std::int64_t t = 0; t < activations.size(0); t += kTokensAtATime) {
        const std::int64_t tokens = std::min(kTokensAtATime, activations.size(0) - t),
                           at = t * row_stride + block * width;
        if (is_bf16)
            kernel.widen_bf16(static_cast<const std::uint16_t*>(activations.const_data_ptr()) + at, row_stride, tokens,
                              width, scratch);
        else
            kernel.widen_fp32(static_cast<const float*>(activations.const_data_ptr()) + at, row_stride, tokens, width,
                              scratch);
        kernel.add_gram(scratch, tokens, width, first_row, last_row, total);
    }
}

void mirror(float* total, std::int64_t width) {
    constexpr std::int64_t kTile = 16;  // a cache line of columns
    for (std::int64_t r0 = 0; r0 < width; r0 += kTile)
        for (std::int64_t c0 = 0; c0 <= r0; c0 += kTile)
            for (std::int64_t r = r0; r < std::min(r0 + kTile, width); ++r)
                for (std::int64_t c = c0; c < std::min(c0 + kTile, r); ++c) total[c * width + r] = total[r * width + c];
}

void gram(const at::Tensor& total, const at::Tensor& activations, std::int64_t width) {
    check_gram(total, activations, width);
    if (activations.numel() == 0) return;
    if (activations.scalar_type() == at::kHalf) {
        for (const at::Tensor& chunk : activations.split(8 * kTokensAtATime)) gram(total, chunk.to(at::kFloat), width);
        return;
    }
    const Kernel& kernel = kernel_in_use();
    const std::int64_t unit = kernel.gram_columns, stride = (width + unit - 1) / unit * unit;
    const std::int64_t blocks = total.size(0), threads = at::get_num_threads();
    // Fewer blocks than threads: each block's rows are shared out too.
    const std::int64_t parts = std::min((threads + blocks - 1) / blocks, stride / unit);
    const std::int64_t rows = (stride / unit + parts - 1) / parts * unit;
    at::parallel_for(0, blocks * parts, 1, [&](std::int64_t begin, std::int64_t end) {
        const at::DataPtr scratch = c10::GetCPUAllocator()->allocate(kTokensAtATime * stride * sizeof(float));
        for (std::int64_t i = begin; i < end; ++i)
            add_rows(kernel, activations, i / parts, width, i % parts * rows, std::min((i % parts + 1) * rows, stride),
                     static_cast<float*>(scratch.get()), total.mutable_data_ptr<float>() + i / parts * width * width);
    });
    at::parallel_for(0, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t j = begin; j < end; ++j) mirror(total.mutable_data_ptr<float>() + j * width * width, width);
    });
}

}  // namespace
}  // namespace dobb::cpu

TORCH_LIBRARY_IMPL(dobb, CPU, library) { library.impl("gram_", dobb::cpu::gram); }
