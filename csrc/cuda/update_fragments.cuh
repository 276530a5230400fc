// How the one-pass kernels lay their tiles out over the lanes of a warp and over shared memory.
#pragma once

#include "update_tile.cuh"

namespace dobb::cuda {

constexpr int kFragment = 16;     // columns of one step
constexpr int kTileRows = 16;     // rows of one tensor-core product
constexpr int kPitchPadding = 8;  // entries

// The parameters of the one-pass kernels.
struct OnePass {
    const Entry* table;
    int entries;
    std::int64_t tiles;
    Settings settings;
    unsigned long long* not_finite;
};

DOBB_HOST_DEVICE int steps_of(std::int64_t width) { return static_cast<int>((width + kFragment - 1) / kFragment); }

constexpr std::size_t kEntryBytes = 128;  // at the start of shared memory: the current entry, which few registers hold
static_assert(sizeof(Entry) <= kEntryBytes);

// Where row `row` of Q lies in shared memory.
DOBB_DEVICE int permuted(int row) { return (row & ~15) | (row & 2) << 2 | (row & 12) >> 1 | (row & 1); }

// What a lane of a warp holds of its tile: rows `lane / 4` and `lane / 4 + 8`, columns from 4 (lane % 4) of each 16.
struct Tile {
    std::int64_t at[2];  // first element of each row
    bool inside[2];
    int width, steps, lane_column;

    DOBB_DEVICE int columns(int row, int step) const {
        return inside[row] ? width - step * kFragment - lane_column : 0;
    }
    DOBB_DEVICE std::int64_t position(int row, int step) const { return at[row] + step * kFragment + lane_column; }
};

// The 16 rows from `first_row` on.
DOBB_DEVICE Tile tile_of(const Entry& entry, const Rows& rows, std::int64_t first_row, int width) {
    const int lane = simt::thread_index() % simt::kWarp;
    Tile tile = {{}, {}, width, steps_of(width), lane % 4 * 4};
    DOBB_UNROLL for (int half = 0; half < 2; ++half) {
        const std::int64_t row = first_row + lane / 4 + 8 * half;
        tile.inside[half] = row < rows.number;
        tile.at[half] = (rows.first + row * entry.blocks) * width;
    }
    return tile;
}

}  // namespace dobb::cuda
