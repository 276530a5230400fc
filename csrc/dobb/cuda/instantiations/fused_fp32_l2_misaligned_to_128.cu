#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_OTHER(, 8)

}  // namespace dobb::cuda
