#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_USUAL(, 1)
DOBB_USUAL(, 2)
DOBB_USUAL(, 3)
DOBB_USUAL(, 4)

}  // namespace dobb::cuda
