// Units of work of the update, and what a compiled variant of the CPU kernels offers. Without PyTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../segment.h"

namespace dobb::cpu {

// A rectangle of a segment that one thread updates at a time: rows of neighbouring blocks, contiguous in memory.
struct Unit {
    std::int32_t segment;
    std::int32_t rows;
    std::int64_t offset;  // of its first element in the segment
    std::int64_t first_block, blocks;
};

// Units of at most `most_rows` rows that cover all segments, each a partial first row, whole rows, a partial last row.
inline std::vector<Unit> plan_units(const std::vector<Segment>& segments, std::int64_t width, std::int64_t most_rows) {
    std::vector<Unit> units;
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const Segment& segment = segments[i];
        const std::int64_t per_row = segment.columns / width, first = segment.start / width;
        const std::int64_t last = first + segment.numel / width;
        for (std::int64_t chunk = first; chunk < last;) {
            const std::int64_t inside = chunk % per_row;
            std::int64_t rows = inside == 0 ? (last - chunk) / per_row : 0, blocks = per_row;
            if (rows > most_rows) rows = most_rows;
            if (rows == 0) {
                rows = 1;
                blocks = last - chunk < per_row - inside ? last - chunk : per_row - inside;
            }
            units.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(rows), (chunk - first) * width,
                             inside, blocks});
            chunk += rows * blocks;
        }
    }
    return units;
}

// One compiled variant of the kernels.
struct Kernel {
    const char* name;
    bool (*supported)();
    // Bytes of scratch memory that a thread needs for units of `rows` rows.
    std::size_t (*scratch_bytes)(std::int64_t width, std::int64_t rows);
    // Updates one unit; returns the number of coefficients that are not finite.
    std::int64_t (*run)(const Segment&, const Settings&, const Unit&, std::byte* scratch);
    // The sums of x x^T, see gram_kernel.h: activations lie in panels of gram_columns features.
    std::int64_t gram_columns;
    void (*widen_fp32)(const float* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width, float* to);
    void (*widen_bf16)(const std::uint16_t* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width,
                       float* to);
    void (*add_gram)(const float* x, std::int64_t tokens, std::int64_t width, std::int64_t first_row,
                     std::int64_t last_row, float* total);
};

// Compiled variants, the fastest first.
const std::vector<Kernel>& all_kernels();

// The fastest one that this processor runs, or the one that a test chose.
const Kernel& kernel_in_use();

}  // namespace dobb::cpu
