// The compiled variants of the one-pass kernels: block widths up to 16 times each of these numbers.
#pragma once

#include "dobb/cuda/kernels/update_fused.cuh"
#include "dobb/cuda/kernels/update_streamed.cuh"

// The usual ones: signs of a bf16 basis, four columns at a time. And all others.
#define DOBB_USUAL_STEPS 1, 2, 3, 4, 6, 8, 12, 16
#define DOBB_OTHER_STEPS 2, 4, 8, 16
// Signs of a bf16 basis that streams, four columns at a time.
#define DOBB_STREAMED_STEPS 20, 26, 32

#define DOBB_INSTANCE(qualifier, ...) qualifier template void launch_fused<Variant<__VA_ARGS__>>(OnePass, simt::Stream);

#define DOBB_USUAL(qualifier, steps)                   \
    DOBB_INSTANCE(qualifier, steps, 1, 1, false, true) \
    DOBB_INSTANCE(qualifier, steps, 2, 1, false, true)

#define DOBB_OTHER(qualifier, steps)                    \
    DOBB_INSTANCE(qualifier, steps, 2, 2, false, true)  \
    DOBB_INSTANCE(qualifier, steps, 2, 1, true, true)   \
    DOBB_INSTANCE(qualifier, steps, 2, 2, true, true)   \
    DOBB_INSTANCE(qualifier, steps, 2, 1, false, false) \
    DOBB_INSTANCE(qualifier, steps, 2, 2, false, false) \
    DOBB_INSTANCE(qualifier, steps, 2, 1, true, false)  \
    DOBB_INSTANCE(qualifier, steps, 2, 2, true, false)

#define DOBB_STREAMED(qualifier, steps)                                                 \
    qualifier template void launch_streamed<Streamed<steps, 1>>(OnePass, simt::Stream); \
    qualifier template void launch_streamed<Streamed<steps, 2>>(OnePass, simt::Stream);

namespace dobb::cuda {

#ifndef DOBB_DEFINES_INSTANCES
DOBB_USUAL(extern, 1)
DOBB_USUAL(extern, 2)
DOBB_USUAL(extern, 3)
DOBB_USUAL(extern, 4)
DOBB_USUAL(extern, 6)
DOBB_USUAL(extern, 8)
DOBB_USUAL(extern, 12)
DOBB_USUAL(extern, 16)
DOBB_OTHER(extern, 2)
DOBB_OTHER(extern, 4)
DOBB_OTHER(extern, 8)
DOBB_OTHER(extern, 16)
DOBB_STREAMED(extern, 20)
DOBB_STREAMED(extern, 26)
DOBB_STREAMED(extern, 32)
#endif

}  // namespace dobb::cuda
