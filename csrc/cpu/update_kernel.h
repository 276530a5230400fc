// The update of Dobb for rows of one block at a time, written over the vector type of vector_*.h.
//
// A tile is the part of a unit that lies in one block: `rows` rows of `width` elements, in three passes while it is in
// cache.
//   1. M <- mu M + (1 - mu) G; the tile that will be projected is left in scratch memory.
//   2. C = M Q in fp32 registers. Of C only the signs are kept, four to a group: the group's number in the table of
//      pass 3. With norm l2 it is C itself, times the scales of its columns.
//   3. S Q^T from the signs or the scaled coefficients, see reconstruct_kernel.h.
#pragma once

namespace dobb::cpu::DOBB_ISA {

// Pass 1.
template <class G, class M>
void update_momentum(const Tile& tile, const G* gradient, M* momentum, const Settings& settings, Scratch& scratch) {
    const Vector weight = broadcast(settings.gradient_weight);
    for (std::int64_t r = 0; r < tile.rows; ++r) {
        const G* g = gradient + r * tile.stride;
        M* m = momentum + r * tile.stride;
        float* source = scratch.source + r * scratch.stride;
        std::int64_t c = 0;
        for (; c + kLanes <= tile.width; c += kLanes) {
            const Vector x = load(g + c), old = load(m + c);
            const Vector updated = multiply_add(weight, subtract(x, old), old);
            store(m + c, updated);
            store(source + c, settings.nesterov ? multiply_add(weight, subtract(x, updated), updated) : updated);
        }
        for (; c < tile.width; ++c) {
            const float x = to_float(g[c]), old = to_float(m[c]);
            const float updated = old + settings.gradient_weight * (x - old);
            put(m + c, updated);
            source[c] = settings.nesterov ? updated + settings.gradient_weight * (x - updated) : updated;
        }
    }
}

// The patterns of one row's `kLanes` coefficients from column `column` on. Returns how many are not finite.
DOBB_INLINE int keep_signs(Vector x, std::int64_t row, std::int64_t column, std::int64_t width, Scratch& scratch) {
    const unsigned all = (1u << kLanes) - 1;
    const std::int64_t left = width - column;
    const unsigned inside = left >= kLanes ? all : (1u << left) - 1;
    const unsigned negative = negative_lanes(x), odd = inside & ~ordinary_lanes(x);
    std::uint16_t* patterns = scratch.patterns + row * scratch.groups + column / kGroup;
    for (int g = 0; g < kLanes / kGroup; ++g)
        patterns[g] = static_cast<std::uint16_t>((negative >> (g * kGroup) & (kPatterns - 1)) * kPattern);
    if (__builtin_expect(odd == 0, 1)) return 0;
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
DOBB_INLINE std::int64_t project_rows(std::int64_t row, std::int64_t column, std::int64_t begin, std::int64_t end,
                                      std::int64_t width, Scratch& scratch) {
    Vector sum[kRows][kVectors];
    float* so_far = scratch.coefficients + row * scratch.padded + column;
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
            sum[r][v] = begin == 0 ? zero() : load(so_far + r * scratch.padded + v * kLanes);
    add_products(scratch.source + row * scratch.stride + begin, scratch.stride,
                 scratch.panel + begin * kVectors * kLanes, end - begin, sum);
    std::int64_t not_finite = 0;
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            if (end < width)
                store(so_far + r * scratch.padded + v * kLanes, sum[r][v]);
            else if (column + v * kLanes < width)
                not_finite += scratch.scaled ? keep_scaled(sum[r][v], row + r, column + v * kLanes, width, scratch)
                                             : keep_signs(sum[r][v], row + r, column + v * kLanes, width, scratch);
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

// Pass 2 for `kVectors` vectors of columns from `column` on.
template <int kVectors, class Q>
std::int64_t project_panel(const Tile& tile, const Q* basis, std::int64_t column, Scratch& scratch) {
    constexpr int kRows = kAccumulators / kVectors;
    pack_columns(basis, tile.width, column, kVectors * kLanes, scratch.panel);
    const std::int64_t parts = (tile.width + kVectors * kLanes - 1) / (kVectors * kLanes);
    const Fetch fetch(tile, column / (kVectors * kLanes), parts);
    std::int64_t not_finite = 0;
    for (std::int64_t begin = 0; begin < tile.width; begin += kDepth) {
        const std::int64_t end = begin + kDepth < tile.width ? begin + kDepth : tile.width;
        const bool first = begin == 0;
        std::int64_t r = 0;
        for (; r + kRows <= tile.rows; r += kRows) {
            if (first)
                for (int i = 0; i < kRows; ++i) fetch.row(tile, r + i);
            not_finite += project_rows<kVectors, kRows>(r, column, begin, end, tile.width, scratch);
        }
        for (; r < tile.rows; ++r) {
            if (first) fetch.row(tile, r);
            not_finite += project_rows<kVectors, 1>(r, column, begin, end, tile.width, scratch);
        }
    }
    return not_finite;
}

template <class Q>
std::int64_t project(const Tile& tile, const Q* basis, Scratch& scratch) {
    std::memset(scratch.marked, 0, static_cast<std::size_t>(tile.rows));
    std::int64_t not_finite = 0, column = 0;
    const auto left = [&] { return (tile.width - column + kLanes - 1) / kLanes; };
    // Four vectors leave by twos rather than as three and one.
    while (left() >= 5 || left() == 3) {
        not_finite += project_panel<3>(tile, basis, column, scratch);
        column += 3 * kLanes;
    }
    while (left() >= 2) {
        not_finite += project_panel<2>(tile, basis, column, scratch);
        column += 2 * kLanes;
    }
    if (left() == 1) not_finite += project_panel<1>(tile, basis, column, scratch);
    return not_finite;
}

std::int64_t run_unit(const Segment& segment, const Settings& settings, const Unit& unit, std::byte* memory) {
    Scratch scratch;
    Scratch::layout(settings.width, unit.rows, memory, &scratch);
    scratch.scaled = segment.column_scales != nullptr;
    const std::int64_t width = settings.width, stride = unit.blocks * width;
    const HeldBlocks held = HeldBlocks::of(segment, width);
    const std::int64_t momentum_size = segment.momentum_is_bf16 ? 2 : 4,
                       gradient_size = segment.gradient_is_bf16 ? 2 : 4;
    std::int64_t not_finite = 0;
    for (std::int64_t k = 0; k < unit.blocks; ++k) {
        const std::int64_t at = unit.offset + k * width;
        char* momentum = static_cast<char*>(segment.momentum) + at * momentum_size;
        const char* gradient = static_cast<const char*>(segment.gradient) + at * gradient_size;
        Tile tile = {unit.rows, width, stride, {}, {}, {}};
        if (k + 1 < unit.blocks) {
            const std::int64_t sizes[3] = {4, momentum_size, gradient_size};
            const char* here[3] = {reinterpret_cast<const char*>(segment.weight + at), momentum, gradient};
            for (int i = 0; i < 3; ++i) {
                tile.next_bytes[i] = width * sizes[i];
                tile.next_stride[i] = stride * sizes[i];
                tile.next[i] = here[i] + tile.next_bytes[i];
            }
        }
        const auto update = [&](auto* g, auto* m) { update_momentum(tile, g, m, settings, scratch); };
        const auto with_momentum = [&](auto* g) {
            if (segment.momentum_is_bf16)
                update(g, reinterpret_cast<std::uint16_t*>(momentum));
            else
                update(g, reinterpret_cast<float*>(momentum));
        };
        if (segment.gradient_is_bf16)
            with_momentum(reinterpret_cast<const std::uint16_t*>(gradient));
        else
            with_momentum(reinterpret_cast<const float*>(gradient));
        const Output output = {segment.weight + at, segment.copy ? segment.copy + at : nullptr, settings.decay,
                               segment.scale};
        const auto apply = [&](const auto* basis) {
            const std::int64_t position = held.position(unit.first_block + k);
            basis += position * width * width;
            if (scratch.scaled) scratch.take_scales(segment.column_scales + position * width, width);
            not_finite += project(tile, basis, scratch);
            if (scratch.scaled)
                reconstruct_scaled(tile, basis, output, scratch);
            else
                reconstruct_signs(tile, basis, output, scratch);
        };
        if (segment.basis_is_bf16)
            apply(static_cast<const std::uint16_t*>(segment.basis));
        else
            apply(static_cast<const float*>(segment.basis));
    }
    return not_finite;
}

}  // namespace dobb::cpu::DOBB_ISA
