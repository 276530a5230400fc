#define DOBB_DEFINES_INSTANCES
#include "update_instances.h"

namespace dobb::cuda {

DOBB_OTHER(, 16)

}  // namespace dobb::cuda
