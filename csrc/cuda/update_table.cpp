#include "update_table.h"

#include <algorithm>
#include <initializer_list>

namespace dobb::cuda {
namespace {

constexpr int kColumnsAtOnce = 4;

bool on_boundary(const void* pointer, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace

bool is_aligned(const Segment& s, std::int64_t width) {
    return width % kColumnsAtOnce == 0 && on_boundary(s.weight, kColumnsAtOnce * 4) &&
           on_boundary(s.gradient, kColumnsAtOnce * (s.gradient_is_bf16 ? 2 : 4)) &&
           on_boundary(s.momentum, kColumnsAtOnce * (s.momentum_is_bf16 ? 2 : 4)) &&
           on_boundary(s.copy, kColumnsAtOnce * 2);
}

Table make_table(const std::vector<Segment>& segments, std::int64_t width) {
    Table table;
    for (const Segment& s : segments) {
        const HeldBlocks held_blocks = HeldBlocks::of(s, width);
        const std::int64_t blocks = s.columns / width, chunks = s.numel / width, held = std::min(blocks, chunks);
        const std::int64_t rows = (chunks + blocks - 1) / blocks, row_tiles = (rows + kTileRows - 1) / kTileRows;
        table.entries.push_back(
            {s.weight, s.gradient, s.momentum, s.basis, s.copy, s.column_scales, table.tiles, chunks,
             static_cast<std::int32_t>(blocks), static_cast<std::int32_t>(s.start / width % blocks),
             static_cast<std::int32_t>(held_blocks.head), static_cast<std::int32_t>(held_blocks.shift),
             static_cast<std::int32_t>(held), static_cast<std::int32_t>(row_tiles), s.scale, s.gradient_is_bf16,
             s.momentum_is_bf16, s.basis_is_bf16, is_aligned(s, width)});
        table.tiles += held * row_tiles;
    }
    return table;
}

}  // namespace dobb::cuda
