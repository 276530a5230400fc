#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_STREAMED_SIGNS_BF16(, 20)
DOBB_STREAMED_SIGNS_BF16(, 26)
DOBB_STREAMED_SIGNS_BF16(, 32)

}  // namespace dobb::cuda
