#include "common/cpu/target.h"
#ifdef DOBB_X86

#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernel.h"
#include "update_task.h"

DOBB_TARGET(DOBB_AVX512BF16)
#define DOBB_ISA avx512bf16
#include "common/cpu/vector_avx512.h"
//
#include "common/cpu/products.h"
//
#include "common/cpu/scalars.h"
//
#include "job.h"
//
#include "traffic.h"
//
#include "common/cpu/matrix_avx512bf16.h"
//
#include "matrix_block.h"
//
#include "update_kernel.h"
//
#include "gram_kernel.h"
//
#include "householder_kernel.h"
DOBB_TARGET_END

namespace dobb::cpu {

static bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}

extern const Kernel kAvx512Bf16Kernel = {"avx512bf16",
                                         supported,
                                         avx512bf16::scratch_bytes,
                                         avx512bf16::run,
                                         avx512bf16::kGramColumns,
                                         avx512bf16::widen_fp32,
                                         avx512bf16::widen_bf16,
                                         avx512bf16::add_gram,
                                         avx512bf16::kPanelKernel};

}  // namespace dobb::cpu

#endif
