#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_STREAMED(, 20)
DOBB_STREAMED(, 26)
DOBB_STREAMED(, 32)

}  // namespace dobb::cuda
