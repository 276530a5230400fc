#include "common/cpu/target.h"
#ifdef DOBB_X86

#include <immintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernel.h"
#include "update_task.h"

DOBB_TARGET(DOBB_AMX)
#define DOBB_ISA amx
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
#include "common/cpu/matrix_amx.h"
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

// Linux lets a process use the tile registers only after it asked for them.
static bool may_use_tiles() {
#ifdef __linux__
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

static bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("amx-bf16") && may_use_tiles();
}

extern const Kernel kAmxKernel = {"amx",           supported,         amx::scratch_bytes,
                                  amx::run,        amx::kGramColumns, amx::widen_fp32,
                                  amx::widen_bf16, amx::add_gram,     amx::kPanelKernel};

}  // namespace dobb::cpu

#endif
