#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_FUSED_SIGNS_BF16(, 6)
DOBB_FUSED_SIGNS_BF16(, 8)
DOBB_FUSED_SIGNS_BF16(, 12)
DOBB_FUSED_SIGNS_BF16(, 16)

}  // namespace dobb::cuda
