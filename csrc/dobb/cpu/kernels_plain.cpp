#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernel.h"
#include "update_task.h"

#define DOBB_ISA plain
#include "common/cpu/vector_plain.h"
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

namespace dobb::cpu {

extern const Kernel kPlainKernel = {"plain",           [] { return true; }, plain::scratch_bytes,
                                    plain::run,        plain::kGramColumns, plain::widen_fp32,
                                    plain::widen_bf16, plain::add_gram,     plain::kPanelKernel};

}  // namespace dobb::cpu
