#include "common/cpu/target.h"
#ifdef DOBB_X86

#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernel.h"
#include "update_task.h"

DOBB_TARGET(DOBB_AVX2)
#define DOBB_ISA avx2
#include "common/cpu/vector_avx2.h"
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

static bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

extern const Kernel kAvx2Kernel = {"avx2",           supported,          avx2::scratch_bytes,
                                   avx2::run,        avx2::kGramColumns, avx2::widen_fp32,
                                   avx2::widen_bf16, avx2::add_gram,     avx2::kPanelKernel};

}  // namespace dobb::cpu

#endif
