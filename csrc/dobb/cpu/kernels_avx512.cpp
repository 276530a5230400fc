#include "common/cpu/target.h"
#ifdef DOBB_X86

#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernel.h"
#include "update_task.h"

DOBB_TARGET(DOBB_AVX512)
#define DOBB_ISA avx512
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
#include "update_scratch.h"
//
#include "project_kernel.h"
//
#include "reconstruct_kernel.h"
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
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

extern const Kernel kAvx512Kernel = {
    "avx512",           supported,          avx512::scratch_bytes, avx512::run,         avx512::kGramColumns,
    avx512::widen_fp32, avx512::widen_bf16, avx512::add_gram,      avx512::kPanelKernel};

}  // namespace dobb::cpu

#endif
