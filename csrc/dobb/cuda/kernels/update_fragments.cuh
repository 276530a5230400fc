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
    int stages;  // of fused_update's rings, which its launcher sets
};

DOBB_HOST_DEVICE int steps_of(std::int64_t width) { return static_cast<int>((width + kFragment - 1) / kFragment); }

constexpr std::size_t kEntryBytes = 128;  // at the start of shared memory: the current entry, which few registers hold
static_assert(sizeof(Entry) <= kEntryBytes);

// Where row `row` of Q lies in shared memory.
DOBB_DEVICE int permuted(int row) { return (row & ~15) | (row & 2) << 2 | (row & 12) >> 1 | (row & 1); }

// What a lane of a warp holds of its tile: rows `lane / 4` and `lane / 4 + 8`, columns from 4 (lane % 4) of each 16.
struct Tile {
    std::int64_t at;  // the lane's first element in its first row
    int rows_left;    // rows of the block from the lane's first row on
    int width, steps;

    // How many of the lane's four columns, or more, are inside the block; 0 or less if none is.
    DOBB_DEVICE int columns(int row, int step) const {
        return 8 * row < rows_left ? width - step * kFragment - simt::thread_index() % 4 * 4 : 0;
    }
    DOBB_DEVICE std::int64_t position(const Entry& entry, int row, int step) const {
        return at + row * entry.eight_rows + step * kFragment;
    }
    // The tile that begins `tiles` tiles further down.
    DOBB_DEVICE Tile after(const Entry& entry, int tiles) const {
        return {at + 2 * tiles * entry.eight_rows, rows_left - tiles * kTileRows, width, steps};
    }
};

// The 16 rows from `first_row` on.
DOBB_DEVICE Tile tile_of(const Entry& entry, const Rows& rows, std::int64_t first_row, int width) {
    const int lane = simt::thread_index() % simt::kWarp;
    const std::int64_t row = first_row + lane / 4, left = rows.number - row;
    constexpr std::int64_t kMany = 1 << 30;
    return {(rows.first + row * entry.blocks) * width + lane % 4 * 4,
            static_cast<int>(left > kMany    ? kMany
                             : left < -kMany ? -kMany
                                             : left),
            width, steps_of(width)};
}

}  // namespace dobb::cuda
