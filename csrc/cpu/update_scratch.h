// What the passes of the update share: the scratch memory of a thread, the tile at hand, and where its result goes.
#pragma once

namespace dobb::cpu::DOBB_ISA {

constexpr int kGroup = 4;                          // coefficients in one group
constexpr int kPatterns = 1 << kGroup;             // signed sums of a group
constexpr int kSumVectors = kLanes >= 16 ? 1 : 2;  // vectors across a panel of output columns
constexpr int kSumColumns = kSumVectors * kLanes;
constexpr int kPattern = kSumColumns * sizeof(float);  // bytes of one signed sum
constexpr std::uint16_t kMarked = 0xffff;              // above every offset of a sum
constexpr int kMostPanelVectors = 3;
constexpr std::int64_t kDepth = 256;         // rows of a panel of Q that are used at a time: it stays in L1
constexpr std::int64_t kGroupsAtATime = 16;  // groups whose sums are in use: 16 KB, half of an L1 cache
constexpr int kCacheLine = 64;

struct Scratch {
    float* source;            // [rows, stride] what is projected
    float* coefficients;      // [rows, padded] sums so far in pass 2; then scaled, or only those of marked groups count
    float* column_scales;     // [padded] of the block's coefficients, zero beyond the width
    std::uint16_t* patterns;  // [rows, groups] byte offset of a group's signed sum, or kMarked
    float* panel;             // [width, panel columns] columns of Q, or [padded, kSumColumns] rows of Q, transposed
    float* sums;              // [kGroupsAtATime, kPatterns, kSumColumns]
    float* direction;         // [rows, kSumColumns] sums so far in pass 3
    std::uint8_t* marked;     // [rows] whether any group is
    bool scaled;              // norm l2: coefficients are scaled; otherwise their signs count
    std::int64_t stride, padded, groups, used_groups;

    static std::int64_t layout(std::int64_t width, std::int64_t rows, std::byte* memory, Scratch* scratch) {
        std::int64_t used = 0;
        const auto take = [&](std::int64_t bytes) {
            std::byte* place = memory + used;
            used += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
            return place;
        };
        // Rows a power of two apart would compete for the same few lines of the cache.
        scratch->stride = width % 512 == 0 ? width + 16 : width;
        scratch->padded = (width + 15) / 16 * 16;
        scratch->groups = scratch->padded / kGroup;
        scratch->used_groups = (width + kGroup - 1) / kGroup;
        scratch->source = reinterpret_cast<float*>(take(rows * scratch->stride * 4));
        scratch->coefficients = reinterpret_cast<float*>(take(rows * scratch->padded * 4));
        scratch->column_scales = reinterpret_cast<float*>(take(scratch->padded * 4));
        scratch->patterns = reinterpret_cast<std::uint16_t*>(take(rows * scratch->groups * 2));
        const std::int64_t panel_columns = std::int64_t{kMostPanelVectors} * kLanes;
        scratch->panel = reinterpret_cast<float*>(take(scratch->padded * panel_columns * 4));
        scratch->sums = reinterpret_cast<float*>(take(kGroupsAtATime * kPatterns * kPattern));
        scratch->direction = reinterpret_cast<float*>(take(rows * kPattern));
        scratch->marked = reinterpret_cast<std::uint8_t*>(take(rows));
        return used;
    }

    void take_scales(const float* scales, std::int64_t width) {
        std::memset(column_scales, 0, static_cast<std::size_t>(padded) * sizeof(float));
        std::memcpy(column_scales, scales, static_cast<std::size_t>(width) * sizeof(float));
    }
};

std::size_t scratch_bytes(std::int64_t width, std::int64_t rows) {
    Scratch scratch;
    return static_cast<std::size_t>(Scratch::layout(width, rows, nullptr, &scratch));
}

DOBB_INLINE float to_float(float x) { return x; }
DOBB_INLINE float to_float(std::uint16_t x) {
    const std::uint32_t bits = std::uint32_t{x} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
DOBB_INLINE void put(float* p, float x) { *p = x; }
DOBB_INLINE void put(std::uint16_t* p, float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    *p = x == x ? static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

// sum[r, :] += left[r, k] panel[k, :] over `depth` k, in registers.
template <int kRows, int kVectors>
DOBB_INLINE void add_products(const float* left, std::int64_t left_stride, const float* panel, std::int64_t depth,
                              Vector (&sum)[kRows][kVectors]) {
    for (std::int64_t k = 0; k < depth; ++k, ++left, panel += kVectors * kLanes) {
        Vector right[kVectors];
        for (int v = 0; v < kVectors; ++v) right[v] = load(panel + v * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vector factor = broadcast(left[r * left_stride]);
            for (int v = 0; v < kVectors; ++v) sum[r][v] = multiply_add(factor, right[v], sum[r][v]);
        }
    }
}

// Where the tile of a block lies, and the tile to fetch into cache meanwhile.
struct Tile {
    std::int64_t rows, width, stride;  // stride between its rows in W, M and G
    const char* next[3];               // first bytes of the next tile in W, M and G, or null
    std::int64_t next_stride[3], next_bytes[3];
};

// The part of each row of the next tile that is fetched while one panel of this tile is computed.
struct Fetch {
    std::int64_t begin[3], end[3];

    Fetch(const Tile& tile, std::int64_t part, std::int64_t parts) {
        for (int i = 0; i < 3; ++i) {
            const bool any = tile.next[i] && part < parts;
            begin[i] = any ? tile.next_bytes[i] * part / parts : 0;
            end[i] = any ? tile.next_bytes[i] * (part + 1) / parts : 0;
        }
    }

    DOBB_INLINE void row(const Tile& tile, std::int64_t row) const {
        for (int i = 0; i < 3; ++i) {
            const char* line = tile.next[i] + row * tile.next_stride[i];
            for (std::int64_t b = begin[i]; b < end[i]; b += kCacheLine) __builtin_prefetch(line + b);
        }
    }
};

struct Output {
    float* weight;
    std::uint16_t* copy;
    float decay, scale;

    DOBB_INLINE void write(std::int64_t at, const float* direction, std::int64_t columns) const {
        if (columns >= kSumColumns) {
            const Vector keep = broadcast(decay), step = broadcast(-scale);
            for (int v = 0; v < kSumVectors; ++v) {
                float* w = weight + at + v * kLanes;
                const Vector x = multiply_add(step, load(direction + v * kLanes), multiply(keep, load(w)));
                store(w, x);
                if (copy) store(copy + at + v * kLanes, x);
            }
            return;
        }
        for (std::int64_t c = 0; c < columns; ++c) {
            const float x = weight[at + c] * decay - scale * direction[c];
            weight[at + c] = x;
            if (copy) put(copy + at + c, x);
        }
    }
};

}  // namespace dobb::cpu::DOBB_ISA
