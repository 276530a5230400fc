// Units of work of the update on a CPU. Without PyTorch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dobb/segment.h"

namespace dobb::cpu {

// A rectangle of a segment that one thread updates at a time.
struct Unit {
    std::int32_t segment;
    std::int32_t rows;
    std::int64_t offset;  // of its first element in the segment
    std::int64_t first_block, blocks;
    std::int64_t row_stride;
};

// Bounds of a unit: at most this many rows, and tiles of rows of blocks. A single row may have as many blocks as tiles.
struct UnitSize {
    std::int64_t rows, blocks;
};

// Floats from one row of a tile to the next: whole cache lines, and never a power of two of them, which would let rows
// compete for the same few lines of the cache.
inline std::int64_t tile_stride(std::int64_t width) {
    const std::int64_t lines = (width + 15) / 16;
    return 16 * (lines % 32 == 0 ? lines + 1 : lines);
}

// Units that cover all segments, each a partial first row, whole rows, a partial last row.
inline std::vector<Unit> plan_units(const std::vector<Segment>& segments, std::int64_t width, const UnitSize& most) {
    std::vector<Unit> units;
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const Segment& segment = segments[i];
        const std::int64_t per_row = segment.columns / width, first = segment.start / width;
        const std::int64_t last = first + segment.numel / width;
        for (std::int64_t chunk = first; chunk < last;) {
            const std::int64_t inside = chunk % per_row;
            std::int64_t rows = inside == 0 ? (last - chunk) / per_row : 0, blocks = per_row;
            if (rows > most.rows) rows = most.rows;
            if (rows == 0) {
                rows = 1;
                blocks = last - chunk < per_row - inside ? last - chunk : per_row - inside;
            }
            const std::int64_t step = rows == 1 ? most.rows * most.blocks : most.blocks;
            for (std::int64_t k = 0; k < blocks; k += step)
                units.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(rows),
                                 (chunk - first + k) * width, inside + k, step < blocks - k ? step : blocks - k,
                                 per_row * width});
            chunk += rows * blocks;
        }
    }
    return units;
}

// What the threads of one call share.
struct Work {
    const std::vector<Segment>& segments;
    const std::vector<Unit>& units;
    const Settings settings;
    const UnitSize most;
    const std::size_t threads;
    std::atomic<std::size_t> next{0};

    // A unit that no thread has taken yet, or null.
    const Unit* take() {
        const std::size_t i = next++;
        return i < units.size() ? &units[i] : nullptr;
    }
    // The same for a thread that still works on another one: the last units are left to threads without work.
    const Unit* take_ahead() { return next.load() + threads < units.size() ? take() : nullptr; }
};

}  // namespace dobb::cpu
