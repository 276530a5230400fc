// Passes 2 and 3 of the update on the matrix units of a processor, for one tile at a time, written over the leaf
// functions of matrix_*.h: these multiply [16, 32] by [32, 16] numbers in bf16 and add in fp32.
//
// A number in fp32 is the sum of two in bf16, high + low, to 2^-17 of it. Precision "exact" takes M and an fp32 Q apart
// and adds the products high high, low high and high low; "bf16" takes the first alone. Signs are exact in bf16.
#pragma once

namespace dobb::cpu::DOBB_ISA {

constexpr std::int64_t kTileSide = 16, kTileDepth = 32, kTileSize = kTileSide * kTileDepth;
constexpr std::int64_t kGroupRows = MatrixUnit::kRowTiles * kTileSide;
constexpr std::int64_t kGroupColumns = MatrixUnit::kColumnTiles * kTileSide;
static_assert(kGroupRows <= 32 && kGroupColumns <= 32, "operands are padded to multiples of 32");

// Numbers in fp32 taken apart; `low` counts only where `has_low`.
struct Halves {
    std::uint16_t *high, *low;
    bool has_low;
};

struct BlockScratch {
    Halves source, kept;  // [rows, depth] M, and the signs or scaled coefficients
    Halves right;         // [kColumnTiles, depth / 32, 16, 32] of Q or Q^T, see pack
    float* sums;          // [kGroupRows, kGroupColumns] of one group of tiles
    std::int64_t depth;   // the width, padded with zeros to a multiple of 32

    // Takes the memory from `take`, a function from bytes to a place.
    template <class Take>
    static void layout(std::int64_t width, std::int64_t rows, Take take, BlockScratch* scratch) {
        scratch->depth = (width + 31) / 32 * 32;
        const std::int64_t left = (rows + 31) / 32 * 32 * scratch->depth, right = kGroupColumns * scratch->depth;
        for (Halves* halves : {&scratch->source, &scratch->kept, &scratch->right})
            for (std::uint16_t** part : {&halves->high, &halves->low})
                *part = reinterpret_cast<std::uint16_t*>(take((halves == &scratch->right ? right : left) * 2));
        scratch->sums = reinterpret_cast<float*>(take(kGroupRows * kGroupColumns * 4));
    }
};

DOBB_INLINE std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// For a finite number the high part is never infinite, nor is the sum of both; one that is not finite stays so, with
// nothing low.
DOBB_INLINE void take_apart(float x, std::uint16_t* high, std::uint16_t* low) {
    const std::uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    const bool finite = magnitude < 0x7f800000u;
    const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    const bool too_large = (rounded & 0x7fffu) == 0x7f80u;
    const std::uint32_t not_finite = bits >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0u);
    *high = static_cast<std::uint16_t>(finite ? rounded - too_large : not_finite);
    const float rest = x - to_float(*high);
    put(low, finite ? rest : 0.0f);
    if (finite && too_large) *low = static_cast<std::uint16_t>(bits_of(rest) >> 16);  // rounded towards zero
}

DOBB_INLINE void take_apart(std::uint16_t x, std::uint16_t* high, std::uint16_t* low) {
    *high = x;
    *low = 0;
}

void clear(const Halves& halves, std::int64_t count) {
    std::memset(halves.high, 0, static_cast<std::size_t>(count) * 2);
    if (halves.has_low) std::memset(halves.low, 0, static_cast<std::size_t>(count) * 2);
}

// Packs columns `first` to `last` of Q, or of its transpose, as the right operand: tile (c, k) holds rows 32 k .. and
// columns first + 16 c .. of it, rows in pairs: [pair, column, which of the pair].
template <bool kTransposed, class Q>
void pack(const Q* basis, std::int64_t width, std::int64_t first, std::int64_t last, BlockScratch& scratch) {
    const auto pack_one = [&](std::int64_t k, std::int64_t column) {
        const std::int64_t tile = (column - first) / kTileSide * (scratch.depth / kTileDepth) + k / kTileDepth;
        const std::int64_t at = tile * kTileSize + k % kTileDepth / 2 * 2 * kTileSide + column % kTileSide * 2 + k % 2;
        take_apart(basis[kTransposed ? column * width + k : k * width + column], scratch.right.high + at,
                   scratch.right.low + at);
    };
    if constexpr (kTransposed) {  // either way along the rows of Q
        for (std::int64_t column = first; column < last; ++column)
            for (std::int64_t k = 0; k < width; ++k) pack_one(k, column);
    } else {
        for (std::int64_t k = 0; k < width; ++k)
            for (std::int64_t column = first; column < last; ++column) pack_one(k, column);
    }
}

// Adds the product of one depth's tiles, rows from `left` and columns from `right` on, to the sums in the unit.
DOBB_INLINE void multiply_tiles(MatrixUnit& unit, const std::uint16_t* left, const std::uint16_t* right,
                                const BlockScratch& scratch) {
    unit.load_left<0>(left, scratch.depth);
    unit.load_right<0>(right);
    if constexpr (MatrixUnit::kRowTiles > 1) unit.load_left<1>(left + kTileSide * scratch.depth, scratch.depth);
    if constexpr (MatrixUnit::kColumnTiles > 1) unit.load_right<1>(right + scratch.depth / kTileDepth * kTileSize);
    unit.multiply<0, 0>();
    if constexpr (MatrixUnit::kColumnTiles > 1) unit.multiply<0, 1>();
    if constexpr (MatrixUnit::kRowTiles > 1) unit.multiply<1, 0>();
    if constexpr (MatrixUnit::kRowTiles > 1 && MatrixUnit::kColumnTiles > 1) unit.multiply<1, 1>();
}

// scratch.sums = kGroupRows rows of `left` from `row` on, times scratch.right.
DOBB_INLINE void multiply_group(const Halves& left, std::int64_t row, BlockScratch& scratch) {
    MatrixUnit unit;
    unit.clear_sums();
    const std::int64_t depth_tiles = scratch.depth / kTileDepth;
    std::int64_t from = row * scratch.depth, to = 0;
    for (std::int64_t k = 0; k < depth_tiles; ++k, from += kTileDepth, to += kTileSize) {
        multiply_tiles(unit, left.high + from, scratch.right.high + to, scratch);
        if (left.has_low) multiply_tiles(unit, left.low + from, scratch.right.high + to, scratch);
        if (scratch.right.has_low) multiply_tiles(unit, left.high + from, scratch.right.low + to, scratch);
    }
    unit.store_sum<0, 0>(scratch.sums, kGroupColumns);
    if constexpr (MatrixUnit::kColumnTiles > 1) unit.store_sum<0, 1>(scratch.sums + kTileSide, kGroupColumns);
    if constexpr (MatrixUnit::kRowTiles > 1) {
        float* second = scratch.sums + kTileSide * kGroupColumns;
        unit.store_sum<1, 0>(second, kGroupColumns);
        if constexpr (MatrixUnit::kColumnTiles > 1) unit.store_sum<1, 1>(second + kTileSide, kGroupColumns);
    }
}

// The signs of `count` coefficients as the next left operand; NaN for one that is not finite. Returns how many are not.
DOBB_INLINE std::int64_t keep_signs(const float* coefficients, std::int64_t count, std::uint16_t* signs) {
    std::int64_t not_finite = 0;
    for (std::int64_t c = 0; c < count; ++c) {
        const std::uint32_t bits = bits_of(coefficients[c]), magnitude = bits & 0x7fffffffu;
        const std::uint32_t sign = magnitude == 0 ? 0u : (bits >> 16 & 0x8000u) | 0x3f80u;
        const bool finite = magnitude < 0x7f800000u;
        signs[c] = static_cast<std::uint16_t>(finite ? sign : 0x7fc0u);
        not_finite += !finite;
    }
    return not_finite;
}

// The same for coefficients times the scales of their columns.
DOBB_INLINE std::int64_t keep_scaled(const float* coefficients, const float* scales, std::int64_t count,
                                     std::uint16_t* high, std::uint16_t* low) {
    std::int64_t not_finite = 0;
    for (std::int64_t c = 0; c < count; ++c) {
        const float scaled = coefficients[c] * scales[c];
        const bool finite = (bits_of(scaled) & 0x7fffffffu) < 0x7f800000u;
        take_apart(finite ? scaled : NAN, high + c, low + c);
        not_finite += !finite;
    }
    return not_finite;
}

std::int64_t groups(std::int64_t width, std::int64_t rows) {
    return ((rows + kGroupRows - 1) / kGroupRows) * ((width + kGroupColumns - 1) / kGroupColumns);
}

// How often `compute` calls advance() for one block.
std::int64_t calls_of_compute(std::int64_t width, std::int64_t rows) { return rows + 2 * groups(width, rows); }

// Calls `take_sums(row, column, rows, columns)` for each group of `left` times Q or its transpose, with the sums in
// place. Q is packed for one group of columns at a time: all of a wide one would be more memory than the update's own.
template <bool kTransposed, class Q, class TakeSums>
void multiply(const Halves& left, const Q* basis, const Tile& tile, BlockScratch& scratch, Traffic& traffic,
              TakeSums take_sums) {
    for (std::int64_t column = 0; column < tile.width; column += kGroupColumns) {
        const std::int64_t columns = tile.width - column < kGroupColumns ? tile.width - column : kGroupColumns;
        pack<kTransposed>(basis, tile.width, column, column + columns, scratch);
        for (std::int64_t row = 0; row < tile.rows; row += kGroupRows) {
            traffic.advance();
            multiply_group(left, row, scratch);
            take_sums(row, column, tile.rows - row < kGroupRows ? tile.rows - row : kGroupRows, columns);
        }
    }
}

// Passes 2 and 3 for one tile. Returns how many coefficients are not finite.
template <class Q>
std::int64_t compute(const Tile& tile, const Q* basis, const float* scales, const Settings& settings,
                     BlockScratch& scratch, Traffic& traffic) {
    scratch.source.has_low = settings.exact;
    scratch.kept.has_low = settings.exact && scales;
    scratch.right.has_low = settings.exact && sizeof(Q) == 4;
    const std::int64_t padded_rows = (tile.rows + 31) / 32 * 32;
    if (scratch.depth != tile.width || padded_rows != tile.rows) {
        clear(scratch.source, padded_rows * scratch.depth);
        clear(scratch.kept, padded_rows * scratch.depth);
        clear(scratch.right, kGroupColumns * scratch.depth);
    }
    for (std::int64_t r = 0; r < tile.rows; ++r) {
        traffic.advance();
        const float* values = tile.values + r * tile.stride;
        std::uint16_t *high = scratch.source.high + r * scratch.depth, *low = scratch.source.low + r * scratch.depth;
        for (std::int64_t c = 0; c < tile.width; ++c) take_apart(values[c], high + c, low + c);
    }
    std::int64_t not_finite = 0;
    multiply<false>(scratch.source, basis, tile, scratch, traffic,
                    [&](std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns) {
                        for (std::int64_t r = 0; r < rows; ++r) {
                            const float* sums = scratch.sums + r * kGroupColumns;
                            const std::int64_t at = (row + r) * scratch.depth + column;
                            not_finite += scales ? keep_scaled(sums, scales + column, columns, scratch.kept.high + at,
                                                               scratch.kept.low + at)
                                                 : keep_signs(sums, columns, scratch.kept.high + at);
                        }
                    });
    multiply<true>(scratch.kept, basis, tile, scratch, traffic,
                   [&](std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns) {
                       for (std::int64_t r = 0; r < rows; ++r)
                           std::memcpy(tile.values + (row + r) * tile.stride + column, scratch.sums + r * kGroupColumns,
                                       static_cast<std::size_t>(columns) * sizeof(float));
                   });
    return not_finite;
}

}  // namespace dobb::cpu::DOBB_ISA
