// The update with matrix units, compiled with the plain leaf functions into a library without PyTorch.
// DOBB_PLAIN_TILES is 2 for groups of tiles as AMX has them, 1 as AVX512-BF16.
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "dobb/cpu/update_task.h"

#define DOBB_ISA emulated
#include "common/cpu/vector_plain.h"
//
#include "common/cpu/scalars.h"
//
#include "dobb/cpu/job.h"
//
#include "dobb/cpu/traffic.h"
//
#include "common/cpu/matrix_plain.h"
//
#include "dobb/cpu/matrix_block.h"
//
#include "dobb/cpu/update_kernel.h"

namespace emulated = dobb::cpu::emulated;

extern "C" {

// Updates one segment; returns how many coefficients are not finite, or -1 if tile registers were not given back.
std::int64_t update_segment(float* weight, const void* gradient, void* momentum, const void* basis, std::uint16_t* copy,
                            const float* column_scales, std::int64_t numel, std::int64_t start, std::int64_t columns,
                            float scale, int gradient_is_bf16, int momentum_is_bf16, int basis_is_bf16,
                            std::int64_t width, float decay, float gradient_weight, int nesterov, int exact,
                            std::int64_t most_rows, std::int64_t most_blocks) {
    const std::vector<dobb::Segment> segments = {{weight, gradient, momentum, basis, copy, column_scales, numel, start,
                                                  columns, scale, gradient_is_bf16 != 0, momentum_is_bf16 != 0,
                                                  basis_is_bf16 != 0}};
    const dobb::cpu::UnitSize most = {most_rows, most_blocks};
    const std::vector<dobb::cpu::Unit> units = dobb::cpu::plan_units(segments, width, most);
    const dobb::Settings settings = {width, decay, gradient_weight, nesterov != 0, exact != 0};
    dobb::cpu::Work work = {segments, units, settings, most, 1};
    // Scratch memory holds anything at first.
    std::vector<std::byte> memory(emulated::scratch_bytes(width, most), std::byte{0xff});
    const std::int64_t not_finite = emulated::run(work, memory.data());
    return emulated::MatrixScope::alive == 0 ? not_finite : -1;
}

// The two halves of `count` numbers.
void take_apart(const float* values, std::int64_t count, std::uint16_t* high, std::uint16_t* low) {
    for (std::int64_t i = 0; i < count; ++i) emulated::take_apart(values[i], high + i, low + i);
}
}
