// The compiled variants of the one-pass kernels: block widths up to 16 times each of these numbers.
#pragma once

#include "dobb/cuda/kernels/update_fused.cuh"
#include "dobb/cuda/kernels/update_streamed.cuh"

// What almost every step runs: signs of a bf16 basis, four columns at a time.
#define DOBB_FUSED_SIGNS_BF16_STEPS 1, 2, 3, 4, 6, 8, 12, 16
// All others: fp32 bases, norm l2, and rows whose columns come one at a time.
#define DOBB_FUSED_FP32_L2_MISALIGNED_STEPS 2, 4, 8, 16
// Signs of a bf16 basis that streams, four columns at a time.
#define DOBB_STREAMED_SIGNS_BF16_STEPS 20, 26, 32

#define DOBB_INSTANCE(qualifier, ...) qualifier template void launch_fused<Variant<__VA_ARGS__>>(OnePass, simt::Stream);

#define DOBB_FUSED_SIGNS_BF16(qualifier, steps)        \
    DOBB_INSTANCE(qualifier, steps, 1, 1, false, true) \
    DOBB_INSTANCE(qualifier, steps, 2, 1, false, true)

#define DOBB_FUSED_FP32_L2_MISALIGNED(qualifier, steps) \
    DOBB_INSTANCE(qualifier, steps, 2, 2, false, true)  \
    DOBB_INSTANCE(qualifier, steps, 2, 1, true, true)   \
    DOBB_INSTANCE(qualifier, steps, 2, 2, true, true)   \
    DOBB_INSTANCE(qualifier, steps, 2, 1, false, false) \
    DOBB_INSTANCE(qualifier, steps, 2, 2, false, false) \
    DOBB_INSTANCE(qualifier, steps, 2, 1, true, false)  \
    DOBB_INSTANCE(qualifier, steps, 2, 2, true, false)

#define DOBB_STREAMED_SIGNS_BF16(qualifier, steps)                                      \
    qualifier template void launch_streamed<Streamed<steps, 1>>(OnePass, simt::Stream); \
    qualifier template void launch_streamed<Streamed<steps, 2>>(OnePass, simt::Stream);

namespace dobb::cuda {

#ifndef DOBB_DEFINES_INSTANCES
DOBB_FUSED_SIGNS_BF16(extern, 1)
DOBB_FUSED_SIGNS_BF16(extern, 2)
DOBB_FUSED_SIGNS_BF16(extern, 3)
DOBB_FUSED_SIGNS_BF16(extern, 4)
DOBB_FUSED_SIGNS_BF16(extern, 6)
DOBB_FUSED_SIGNS_BF16(extern, 8)
DOBB_FUSED_SIGNS_BF16(extern, 12)
DOBB_FUSED_SIGNS_BF16(extern, 16)
DOBB_FUSED_FP32_L2_MISALIGNED(extern, 2)
DOBB_FUSED_FP32_L2_MISALIGNED(extern, 4)
DOBB_FUSED_FP32_L2_MISALIGNED(extern, 8)
DOBB_FUSED_FP32_L2_MISALIGNED(extern, 16)
DOBB_STREAMED_SIGNS_BF16(extern, 20)
DOBB_STREAMED_SIGNS_BF16(extern, 26)
DOBB_STREAMED_SIGNS_BF16(extern, 32)
#endif

}  // namespace dobb::cuda
