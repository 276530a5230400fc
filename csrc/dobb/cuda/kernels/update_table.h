// What the CUDA kernels of the update know of a segment, one entry of a table in the GPU's memory. Without PyTorch.
//
// The segment's elements are chunks of one block width. A chunk's block is its number in its row; the chunks of one
// block lie one row apart. A tile is a kernel's number of such chunks, and tiles are numbered through the whole table:
// all row tiles of a segment's first held block, then of its second, and so on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dobb/segment.h"

namespace dobb::cuda {

constexpr int kColumnsAtOnce = 4;

struct Entry {
    float* weight;
    const void* gradient;
    void* momentum;
    const void* basis;
    std::uint16_t* copy;
    const float* column_scales;
    std::int64_t first_tile;   // number of its first tile in the table
    std::int64_t chunks;       // in the segment
    std::int64_t eight_rows;   // elements from a row to the eighth after it
    std::int32_t blocks;       // in one row of the weight
    std::int32_t first_block;  // of the first chunk
    std::int32_t head, shift;  // see HeldBlocks
    std::int32_t held;         // number of bases
    std::int32_t row_tiles;    // for each held block; the last can be empty
    float scale;
    std::uint8_t gradient_is_bf16, momentum_is_bf16, basis_is_bf16;
};

struct Table {
    std::vector<Entry> entries;
    std::int64_t tiles = 0;
};

inline bool on_boundary(const void* pointer, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Whether four neighbouring columns, from a multiple of four on, can be read and written at once.
inline bool is_aligned(const Segment& s, std::int64_t width) {
    return width % kColumnsAtOnce == 0 && on_boundary(s.weight, kColumnsAtOnce * 4) &&
           on_boundary(s.gradient, kColumnsAtOnce * (s.gradient_is_bf16 ? 2 : 4)) &&
           on_boundary(s.momentum, kColumnsAtOnce * (s.momentum_is_bf16 ? 2 : 4)) &&
           on_boundary(s.copy, kColumnsAtOnce * 2);
}

// Entries of segments that are not empty.
inline Table make_table(const std::vector<Segment>& segments, std::int64_t width, std::int64_t tile_rows) {
    Table table;
    for (const Segment& s : segments) {
        const HeldBlocks held_blocks = HeldBlocks::of(s, width);
        const std::int64_t blocks = s.columns / width, chunks = s.numel / width, held = std::min(blocks, chunks);
        const std::int64_t rows = (chunks + blocks - 1) / blocks, row_tiles = (rows + tile_rows - 1) / tile_rows;
        table.entries.push_back(
            {s.weight, s.gradient, s.momentum, s.basis, s.copy, s.column_scales, table.tiles, chunks, 8 * s.columns,
             static_cast<std::int32_t>(blocks), static_cast<std::int32_t>(s.start / width % blocks),
             static_cast<std::int32_t>(held_blocks.head), static_cast<std::int32_t>(held_blocks.shift),
             static_cast<std::int32_t>(held), static_cast<std::int32_t>(row_tiles), s.scale, s.gradient_is_bf16,
             s.momentum_is_bf16, s.basis_is_bf16});
        table.tiles += held * row_tiles;
    }
    return table;
}

}  // namespace dobb::cuda
