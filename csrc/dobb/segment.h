// What one step of Dobb does to flat segments, without PyTorch: shared by the CPU and the CUDA kernels of the update.
#pragma once

#include <cstdint>

namespace dobb {

// A flat range of whole blocks of a row-major weight and all that its update touches.
struct Segment {
    float* weight;         // [numel]
    const void* gradient;  // [numel] fp32, or bf16 where gradient_is_bf16
    void* momentum;        // [numel] fp32 or bf16
    const void* basis;     // [held, width, width] fp32 or bf16
    std::uint16_t* copy;   // [numel] bf16 copy of the weight, or null
    // [held, width] what each coefficient is multiplied by instead of taking its sign (norm l2), or null (norm sign)
    const float* column_scales;
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
    bool exact = true;  // signs as of fp32 products; otherwise M and Q may be rounded to bf16
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

}  // namespace dobb
