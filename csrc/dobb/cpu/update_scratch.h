// Scratch memory of a thread, which the passes over one block share.
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

struct Scratch {
    float* coefficients;      // [rows, padded] sums so far in pass 2; then scaled, or only those of marked groups count
    float* column_scales;     // [padded] of the block's coefficients, zero beyond the width
    std::uint16_t* patterns;  // [rows, groups] byte offset of a group's signed sum, or kMarked
    float* panel;             // [width, panel columns] columns of Q, or [padded, kSumColumns] rows of Q, transposed
    float* sums;              // [kGroupsAtATime, kPatterns, kSumColumns]
    std::uint8_t* marked;     // [rows] whether any group is
    bool scaled;              // norm l2: coefficients are scaled; otherwise their signs count
    std::int64_t padded, groups, used_groups;

    // Takes the memory from `take`, a function from bytes to a place.
    template <class Take>
    static void layout(std::int64_t width, std::int64_t rows, Take take, Scratch* scratch) {
        scratch->padded = (width + 15) / 16 * 16;
        scratch->groups = scratch->padded / kGroup;
        scratch->used_groups = (width + kGroup - 1) / kGroup;
        scratch->coefficients = reinterpret_cast<float*>(take(rows * scratch->padded * 4));
        scratch->column_scales = reinterpret_cast<float*>(take(scratch->padded * 4));
        scratch->patterns = reinterpret_cast<std::uint16_t*>(take(rows * scratch->groups * 2));
        const std::int64_t panel_columns = std::int64_t{kMostPanelVectors} * kLanes;
        scratch->panel = reinterpret_cast<float*>(take(scratch->padded * panel_columns * 4));
        scratch->sums = reinterpret_cast<float*>(take(kGroupsAtATime * kPatterns * kPattern));
        scratch->marked = reinterpret_cast<std::uint8_t*>(take(rows));
    }

    void take_scales(const float* scales, std::int64_t width) {
        std::memset(column_scales, 0, static_cast<std::size_t>(padded) * sizeof(float));
        std::memcpy(column_scales, scales, static_cast<std::size_t>(width) * sizeof(float));
    }
};

}  // namespace dobb::cpu::DOBB_ISA
