#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_OTHER(, 2)
DOBB_OTHER(, 4)

}  // namespace dobb::cuda
