// What one step of Dobb does to flat segments, without PyTorch: shared by all CPU kernels of the update.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dobb::cpu {

// A flat range of whole blocks of a row-major weight and all that its update touches.
struct Segment {
    float* weight;         // [numel]
    const void* gradient;  // [numel] fp32, or bf16 where gradient_is_bf16
    void* momentum;        // [numel] fp32 or bf16
    const void* basis;     // [held, width, width] fp32 or bf16
    std::uint16_t* copy;   // [numel] bf16 copy of the weight, or null
    std::int64_t numel;
    std::int64_t start;    // position of the range in its weight, a multiple of the width
    std::int64_t columns;  // of the weight on this rank
    float scale;           // learning rate times the scale of the direction
    bool gradient_is_bf16, momentum_is_bf16, basis_is_bf16;
};

struct Settings {
    std::int64_t width;     // columns in one block
    float decay;            // 1 - learning rate times weight decay
    float gradient_weight;  // 1 - mu
    bool nesterov;
};

// Which basis of a segment belongs to block `block` of a row. The held blocks, in ascending order, are all, one run,
// or (a range that wraps a row end and is shorter than a row) [0, head) and [tail, blocks).
struct HeldBlocks {
    std::int64_t head;   // blocks below it lie at their own number
    std::int64_t shift;  // the others this much lower

    static HeldBlocks of(const Segment& segment, std::int64_t width) {
        const std::int64_t per_row = segment.columns / width, chunks = segment.numel / width;
        const std::int64_t first = segment.start / width % per_row;
        if (chunks >= per_row) return {per_row, 0};
        if (first + chunks <= per_row) return {0, first};
        const std::int64_t head = first + chunks - per_row;
        return {head, first - head};
    }

    std::int64_t position(std::int64_t block) const { return block < head ? block : block - shift; }
};

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
