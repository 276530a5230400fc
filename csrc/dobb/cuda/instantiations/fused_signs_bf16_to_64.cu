#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_FUSED_SIGNS_BF16(, 1)
DOBB_FUSED_SIGNS_BF16(, 2)
DOBB_FUSED_SIGNS_BF16(, 3)
DOBB_FUSED_SIGNS_BF16(, 4)

}  // namespace dobb::cuda
