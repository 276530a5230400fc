// Pass 3 of the update, written over the vector type of vector_*.h: S Q^T in the place of the tile.
//
// Signs go by table: a group of four columns of Q has sixteen signed sums, which are computed once for all rows of the
// tile, and one addition then stands for four. A coefficient that is zero or not finite has no place in the tables: its
// group is marked, and summed one by one.
// Scaled coefficients (norm l2) are a plain product in fp32.
#pragma once

namespace dobb::cpu::DOBB_ISA {

// panel[d, i] = Q[row + i, d] for the kSumColumns rows of Q from `row` on, zero outside of Q.
template <class Q>
void pack_rows(const Q* basis, std::int64_t width, std::int64_t row, std::int64_t padded, float* panel) {
    const std::int64_t inside = width - row < kSumColumns ? width - row : kSumColumns;
    if (inside < kSumColumns || padded != width)
        std::memset(panel, 0, static_cast<std::size_t>(padded * kSumColumns) * sizeof(float));
    const std::int64_t whole_rows = inside / 8 * 8, whole_columns = width / 8 * 8;
    for (std::int64_t d = 0; d < whole_columns; d += 8)
        for (std::int64_t i = 0; i < whole_rows; i += 8)
            transpose_8x8(basis + (row + i) * width + d, width, panel + d * kSumColumns + i, kSumColumns);
    for (std::int64_t i = 0; i < inside; ++i)
        for (std::int64_t d = i < whole_rows ? whole_columns : 0; d < width; ++d)
            panel[d * kSumColumns + i] = to_float(basis[(row + i) * width + d]);
}

// sums[g, p] = sum over k < 4 of (-1)^(bit k of p) panel[4 (first + g) + k], for `count` groups.
DOBB_INLINE void tabulate(std::int64_t first, std::int64_t count, Scratch& scratch) {
    for (std::int64_t g = 0; g < count; ++g)
        for (int v = 0; v < kSumVectors; ++v) {
            const float* q = scratch.panel + (first + g) * kGroup * kSumColumns + v * kLanes;
            float* sums = scratch.sums + g * kPatterns * kSumColumns + v * kLanes;
            const Vector q0 = load(q), q1 = load(q + kSumColumns);
            const Vector q2 = load(q + 2 * kSumColumns), q3 = load(q + 3 * kSumColumns);
            const Vector same = add(q0, q1), different = subtract(q0, q1);
            const Vector low[4] = {same, subtract(zero(), different), different, subtract(zero(), same)};
            const Vector same2 = add(q2, q3), different2 = subtract(q2, q3);
            const Vector high[4] = {same2, subtract(zero(), different2), different2, subtract(zero(), same2)};
            for (int h = 0; h < 4; ++h)
                for (int l = 0; l < 4; ++l) store(sums + (h * 4 + l) * kSumColumns, add(low[l], high[h]));
        }
}

// Adds the groups first .. first + count of `kRows` rows, none of them marked, to their directions.
template <int kRows>
DOBB_INLINE void add_sums(const Tile& tile, std::int64_t column, std::int64_t row, std::int64_t first,
                          std::int64_t count, Scratch& scratch) {
    Vector sum[kRows][kSumVectors];
    float* direction = tile.values + row * tile.stride + column;
    for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < kSumVectors; ++v)
            sum[i][v] = first == 0 ? zero() : load(direction + i * tile.stride + v * kLanes);
    const char* sums = reinterpret_cast<const char*>(scratch.sums);
    const std::uint16_t* patterns = scratch.patterns + row * scratch.groups + first;
    for (std::int64_t g = 0; g < count; ++g, sums += kPatterns * kPattern)
        for (int i = 0; i < kRows; ++i) {
            const float* found = reinterpret_cast<const float*>(sums + patterns[i * scratch.groups + g]);
            for (int v = 0; v < kSumVectors; ++v) sum[i][v] = add(sum[i][v], load(found + v * kLanes));
        }
    for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < kSumVectors; ++v) store(direction + i * tile.stride + v * kLanes, sum[i][v]);
}

// The same for a row that has marked groups, which are summed one coefficient at a time.
void add_marked_row(const Tile& tile, std::int64_t column, std::int64_t row, std::int64_t first, std::int64_t count,
                    Scratch& scratch) {
    Vector sum[kSumVectors];
    float* direction = tile.values + row * tile.stride + column;
    for (int v = 0; v < kSumVectors; ++v) sum[v] = first == 0 ? zero() : load(direction + v * kLanes);
    const std::uint16_t* patterns = scratch.patterns + row * scratch.groups;
    const float* coefficients = scratch.coefficients + row * scratch.padded;
    const char* sums = reinterpret_cast<const char*>(scratch.sums);
    for (std::int64_t g = first; g < first + count; ++g, sums += kPatterns * kPattern) {
        if (patterns[g] != kMarked) {
            for (int v = 0; v < kSumVectors; ++v)
                sum[v] = add(sum[v], load(reinterpret_cast<const float*>(sums + patterns[g]) + v * kLanes));
            continue;
        }
        for (int k = 0; k < kGroup; ++k) {
            const float c = coefficients[g * kGroup + k];
            if (c == 0) continue;
            const Vector s = broadcast(!std::isfinite(c) ? NAN : c > 0 ? 1.0f : -1.0f);
            for (int v = 0; v < kSumVectors; ++v)
                sum[v] = multiply_add(s, load(scratch.panel + (g * kGroup + k) * kSumColumns + v * kLanes), sum[v]);
        }
    }
    for (int v = 0; v < kSumVectors; ++v) store(direction + v * kLanes, sum[v]);
}

template <class Q>
void reconstruct_signs(const Tile& tile, const Q* basis, Scratch& scratch) {
    constexpr int kRows = kAccumulators >= 24 ? 8 : 4;
    for (std::int64_t column = 0; column < tile.width; column += kSumColumns) {
        pack_rows(basis, tile.width, column, scratch.padded, scratch.panel);
        for (std::int64_t first = 0; first < scratch.used_groups; first += kGroupsAtATime) {
            const std::int64_t left = scratch.used_groups - first;
            const std::int64_t count = left < kGroupsAtATime ? left : kGroupsAtATime;
            tabulate(first, count, scratch);
            for (std::int64_t r = 0; r < tile.rows; r += kRows) {
                int marked = r + kRows > tile.rows;
                for (int i = 0; i < kRows && r + i < tile.rows; ++i) marked |= scratch.marked[r + i];
                if (!marked)
                    add_sums<kRows>(tile, column, r, first, count, scratch);
                else
                    for (int i = 0; i < kRows && r + i < tile.rows; ++i)
                        add_marked_row(tile, column, r + i, first, count, scratch);
            }
        }
    }
}

// The directions of rows `row .. row + kRows`, for the panel's columns.
template <int kRows>
DOBB_INLINE void multiply_scaled(const Tile& tile, std::int64_t column, std::int64_t row, Scratch& scratch) {
    Vector sum[kRows][kSumVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kSumVectors; ++v) sum[r][v] = zero();
    add_products(scratch.coefficients + row * scratch.padded, scratch.padded, 1, scratch.panel, tile.width, sum);
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kSumVectors; ++v)
            store(tile.values + (row + r) * tile.stride + column + v * kLanes, sum[r][v]);
}

template <class Q>
void reconstruct_scaled(const Tile& tile, const Q* basis, Scratch& scratch) {
    constexpr int kRows = kAccumulators / kSumVectors;
    for (std::int64_t column = 0; column < tile.width; column += kSumColumns) {
        pack_rows(basis, tile.width, column, scratch.padded, scratch.panel);
        std::int64_t r = 0;
        for (; r + kRows <= tile.rows; r += kRows) multiply_scaled<kRows>(tile, column, r, scratch);
        for (; r < tile.rows; ++r) multiply_scaled<1>(tile, column, r, scratch);
    }
}

using BlockScratch = Scratch;

struct MatrixScope {
    MatrixScope() {}  // vectors need nothing made ready
};

std::int64_t calls_of_compute(std::int64_t width, std::int64_t rows) { return calls_of_project(width, rows); }

// Passes 2 and 3 for one tile. Returns how many coefficients are not finite.
template <class Q>
std::int64_t compute(const Tile& tile, const Q* basis, const float* scales, const Settings&, Scratch& scratch,
                     Traffic& traffic) {
    scratch.scaled = scales != nullptr;
    if (scratch.scaled) scratch.take_scales(scales, tile.width);
    const std::int64_t not_finite = project(tile, basis, scratch, traffic);
    if (scratch.scaled)
        reconstruct_scaled(tile, basis, scratch);
    else
        reconstruct_signs(tile, basis, scratch);
    return not_finite;
}

}  // namespace dobb::cpu::DOBB_ISA
