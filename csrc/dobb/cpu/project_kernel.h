// Pass 2 of the update, written over the vector type of vector_*.h: C = M Q for one tile in fp32 registers.
//
// Of C only the signs are kept, four to a group: the group's number in the table of pass 3. With norm l2 it is C
// itself, times the scales of its columns.
#pragma once

namespace dobb::cpu::DOBB_ISA {

// The patterns of one row's `kLanes` coefficients from column `column` on.
DOBB_INLINE void keep_patterns(Vector x, std::uint16_t* patterns) {
    const unsigned negative = negative_lanes(x);
    for (int g = 0; g < kLanes / kGroup; ++g)
        patterns[g] = static_cast<std::uint16_t>((negative >> (g * kGroup) & (kPatterns - 1)) * kPattern);
}

// Marks the groups of one row's `kLanes` coefficients that hold a zero or one that is not finite. Returns how many are
// not finite.
int mark_odd(Vector x, std::int64_t row, std::int64_t column, std::int64_t width, Scratch& scratch) {
    const unsigned all = (1u << kLanes) - 1;
    const std::int64_t left = width - column;
    const unsigned inside = left >= kLanes ? all : (1u << left) - 1;
    const unsigned odd = inside & ~ordinary_lanes(x);
    if (odd == 0) return 0;
    std::uint16_t* patterns = scratch.patterns + row * scratch.groups + column / kGroup;
    float* coefficients = scratch.coefficients + row * scratch.padded + column;
    store(coefficients, x);
    int not_finite = 0;
    for (int i = 0; i < kLanes; ++i) {
        if (!(odd >> i & 1)) continue;
        patterns[i / kGroup] = kMarked;
        not_finite += !std::isfinite(coefficients[i]);
    }
    scratch.marked[row] = 1;
    return not_finite;
}

// The patterns of the coefficients `sum` of rows from `row` and columns from `column` on. Returns how many are not
// finite.
template <int kRows, int kVectors>
DOBB_INLINE std::int64_t keep_signs(const Vector (&sum)[kRows][kVectors], std::int64_t row, std::int64_t column,
                                    std::int64_t width, Scratch& scratch) {
    Vector least = magnitude(sum[0][0]), total = zero();
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            if (column + v * kLanes >= width) continue;
            keep_patterns(sum[r][v], scratch.patterns + (row + r) * scratch.groups + (column + v * kLanes) / kGroup);
            const Vector size = magnitude(sum[r][v]);
            least = smaller(size, least);
            total = add(total, size);
        }
    // A sum of magnitudes that is finite has none in it that is not.
    if (__builtin_expect(ordinary_lanes(least) == (1u << kLanes) - 1 && ordinary_lanes(total) == (1u << kLanes) - 1, 1))
        return 0;
    std::int64_t not_finite = 0;
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
            if (column + v * kLanes < width)
                not_finite += mark_odd(sum[r][v], row + r, column + v * kLanes, width, scratch);
    return not_finite;
}

// Scales and keeps one row's `kLanes` coefficients from column `column` on. Returns how many are not finite.
DOBB_INLINE int keep_scaled(Vector x, std::int64_t row, std::int64_t column, std::int64_t width, Scratch& scratch) {
    float* coefficients = scratch.coefficients + row * scratch.padded + column;
    const Vector scaled = multiply(x, load(scratch.column_scales + column));
    store(coefficients, scaled);
    if (__builtin_expect(ordinary_lanes(scaled) == (1u << kLanes) - 1, 1)) return 0;
    int not_finite = 0;
    for (int i = 0; i < kLanes && column + i < width; ++i)
        if (!std::isfinite(coefficients[i])) {
            coefficients[i] = NAN;
            ++not_finite;
        }
    return not_finite;
}

// Rows `row .. row + kRows` of C for the columns in the panel: adds the products of k in [begin, end).
template <int kVectors, int kRows>
DOBB_INLINE std::int64_t project_rows(const Tile& tile, std::int64_t row, std::int64_t column, std::int64_t begin,
                                      std::int64_t end, Scratch& scratch) {
    Vector sum[kRows][kVectors];
    float* so_far = scratch.coefficients + row * scratch.padded + column;
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
            sum[r][v] = begin == 0 ? zero() : load(so_far + r * scratch.padded + v * kLanes);
    add_products(tile.values + row * tile.stride + begin, tile.stride, 1, scratch.panel + begin * kVectors * kLanes,
                 end - begin, sum);
    const std::int64_t width = tile.width;
    if (end == width && !scratch.scaled) return keep_signs(sum, row, column, width, scratch);
    std::int64_t not_finite = 0;
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            if (end < width)
                store(so_far + r * scratch.padded + v * kLanes, sum[r][v]);
            else if (column + v * kLanes < width)
                not_finite += keep_scaled(sum[r][v], row + r, column + v * kLanes, width, scratch);
        }
    return not_finite;
}

template <class Q>
void pack_columns(const Q* basis, std::int64_t width, std::int64_t column, std::int64_t columns, float* panel) {
    const std::int64_t inside = width - column < columns ? width - column : columns;
    for (std::int64_t k = 0; k < width; ++k, panel += columns) {
        const Q* row = basis + k * width + column;
        std::int64_t c = 0;
        for (; c + kLanes <= inside; c += kLanes) store(panel + c, load(row + c));
        for (; c < inside; ++c) panel[c] = to_float(row[c]);
        for (; c < columns; ++c) panel[c] = 0;
    }
}

// C for `kVectors` vectors of columns from `column` on.
template <int kVectors, class Q>
std::int64_t project_panel(const Tile& tile, const Q* basis, std::int64_t column, Scratch& scratch, Traffic& traffic) {
    constexpr int kRows = kAccumulators / kVectors;
    pack_columns(basis, tile.width, column, kVectors * kLanes, scratch.panel);
    std::int64_t not_finite = 0;
    for (std::int64_t begin = 0; begin < tile.width; begin += kDepth) {
        const std::int64_t end = begin + kDepth < tile.width ? begin + kDepth : tile.width;
        std::int64_t r = 0;
        for (; r + kRows <= tile.rows; r += kRows) {
            traffic.advance();
            not_finite += project_rows<kVectors, kRows>(tile, r, column, begin, end, scratch);
        }
        for (; r < tile.rows; ++r) not_finite += project_rows<kVectors, 1>(tile, r, column, begin, end, scratch);
    }
    return not_finite;
}

// Vectors in the next panel, of `left` vectors of columns: four leave by twos rather than as three and one.
inline int panel_vectors(std::int64_t left) { return left >= 5 || left == 3 ? 3 : left >= 2 ? 2 : 1; }

// How often `project` calls advance() for one block.
std::int64_t calls_of_project(std::int64_t width, std::int64_t rows) {
    std::int64_t calls = 0;
    for (std::int64_t left = (width + kLanes - 1) / kLanes; left > 0; left -= panel_vectors(left))
        calls += (width + kDepth - 1) / kDepth * (rows / (kAccumulators / panel_vectors(left)));
    return calls;
}

template <class Q>
std::int64_t project(const Tile& tile, const Q* basis, Scratch& scratch, Traffic& traffic) {
    std::memset(scratch.marked, 0, static_cast<std::size_t>(tile.rows));
    std::int64_t not_finite = 0, column = 0;
    for (std::int64_t left = (tile.width + kLanes - 1) / kLanes; left > 0;) {
        const int vectors = panel_vectors(left);
        not_finite += vectors == 3   ? project_panel<3>(tile, basis, column, scratch, traffic)
                      : vectors == 2 ? project_panel<2>(tile, basis, column, scratch, traffic)
                                     : project_panel<1>(tile, basis, column, scratch, traffic);
        column += vectors * kLanes;
        left -= vectors;
    }
    return not_finite;
}

}  // namespace dobb::cpu::DOBB_ISA
