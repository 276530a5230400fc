// The warp-wide operations, once all lanes have come to them.
#pragma once

#include "dobb_simt.h"

namespace dobb::simt::emulation {

// `arguments` are the lanes' structs of dobb_simt.h.
void run_for_warp(Operation operation, void* const (&arguments)[kWarp]);

}  // namespace dobb::simt::emulation
