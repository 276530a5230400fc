#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_FUSED_FP32_L2_MISALIGNED(, 8)

}  // namespace dobb::cuda
