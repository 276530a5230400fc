#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_USUAL(, 6)
DOBB_USUAL(, 8)
DOBB_USUAL(, 12)
DOBB_USUAL(, 16)

}  // namespace dobb::cuda
