// The update of Dobb for rows of one block at a time, written over the vector type of vector_*.h.
//
// A tile is the part of a unit that lies in one block: `rows` rows of `width` elements, in three passes while it is in
// cache.
//   1. M <- mu M + (1 - mu) G; the tile that will be projected is left in scratch memory.
//   2. C = M Q in fp32 registers. Only the signs of C are kept, four to a group: the group's number in a table.
//   3. S Q^T by table: a group of four columns of Q has sixteen signed sums, which are computed once for all rows of
//      the tile. One addition then stands for four. The result goes from registers into W.
// A coefficient that is zero or not finite has no place in the tables: its group is marked, and summed one by one.
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
    float* coefficients;      // [rows, padded] sums so far in pass 2; then only those of marked groups count
    std::uint16_t* patterns;  // [rows, groups] byte offset of a group's signed sum, or kMarked
    float* panel;             // [width, panel columns] columns of Q, or [padded, kSumColumns] rows of Q, transposed
    float* sums;              // [kGroupsAtATime, kPatterns, kSumColumns]
    float* direction;         // [rows, kSumColumns] sums so far in pass 3
    std::uint8_t* marked;     // [rows] whether any group is
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
        scratch->patterns = reinterpret_cast<std::uint16_t*>(take(rows * scratch->groups * 2));
        const std::int64_t panel_columns = std::int64_t{kMostPanelVectors} * kLanes;
        scratch->panel = reinterpret_cast<float*>(take(scratch->padded * panel_columns * 4));
        scratch->sums = reinterpret_cast<float*>(take(kGroupsAtATime * kPatterns * kPattern));
        scratch->direction = reinterpret_cast<float*>(take(rows * kPattern));
        scratch->marked = reinterpret_cast<std::uint8_t*>(take(rows));
        return used;
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

// Where the tile of a block lies, and the tile to fetch into cache meanwhile.
struct Tile {
    std::int64_t rows, width, stride;  // stride between its rows in W, M and G
    const char* next[3];               // first bytes of the next tile in W, M and G, or null
    std::int64_t next_stride[3], next_bytes[3];
};

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

// Rows `row .. row + kRows` of C for the columns in the panel: adds the products of k in [begin, end).
template <int kVectors, int kRows>
DOBB_INLINE std::int64_t project_rows(std::int64_t row, std::int64_t column, std::int64_t begin, std::int64_t end,
                                      std::int64_t width, Scratch& scratch) {
    Vector sum[kRows][kVectors];
    float* so_far = scratch.coefficients + row * scratch.padded + column;
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
            sum[r][v] = begin == 0 ? zero() : load(so_far + r * scratch.padded + v * kLanes);
    const float* source = scratch.source + row * scratch.stride + begin;
    const float* panel = scratch.panel + begin * kVectors * kLanes;
    for (std::int64_t k = begin; k < end; ++k, ++source, panel += kVectors * kLanes) {
        Vector q[kVectors];
        for (int v = 0; v < kVectors; ++v) q[v] = load(panel + v * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vector m = broadcast(source[r * scratch.stride]);
            for (int v = 0; v < kVectors; ++v) sum[r][v] = multiply_add(m, q[v], sum[r][v]);
        }
    }
    std::int64_t not_finite = 0;
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            if (end < width)
                store(so_far + r * scratch.padded + v * kLanes, sum[r][v]);
            else if (column + v * kLanes < width)
                not_finite += keep_signs(sum[r][v], row + r, column + v * kLanes, width, scratch);
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
DOBB_INLINE void add_sums(std::int64_t row, std::int64_t first, std::int64_t count, Scratch& scratch) {
    Vector sum[kRows][kSumVectors];
    float* direction = scratch.direction + row * kSumColumns;
    for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < kSumVectors; ++v)
            sum[i][v] = first == 0 ? zero() : load(direction + i * kSumColumns + v * kLanes);
    const char* sums = reinterpret_cast<const char*>(scratch.sums);
    const std::uint16_t* patterns = scratch.patterns + row * scratch.groups + first;
    for (std::int64_t g = 0; g < count; ++g, sums += kPatterns * kPattern)
        for (int i = 0; i < kRows; ++i) {
            const float* found = reinterpret_cast<const float*>(sums + patterns[i * scratch.groups + g]);
            for (int v = 0; v < kSumVectors; ++v) sum[i][v] = add(sum[i][v], load(found + v * kLanes));
        }
    for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < kSumVectors; ++v) store(direction + i * kSumColumns + v * kLanes, sum[i][v]);
}

// The same for a row that has marked groups, which are summed one coefficient at a time.
void add_marked_row(std::int64_t row, std::int64_t first, std::int64_t count, Scratch& scratch) {
    Vector sum[kSumVectors];
    float* direction = scratch.direction + row * kSumColumns;
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

// Pass 3.
template <class Q>
void reconstruct(const Tile& tile, const Q* basis, const Output& output, Scratch& scratch) {
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
                    add_sums<kRows>(r, first, count, scratch);
                else
                    for (int i = 0; i < kRows && r + i < tile.rows; ++i) add_marked_row(r + i, first, count, scratch);
            }
        }
        for (std::int64_t r = 0; r < tile.rows; ++r)
            output.write(r * tile.stride + column, scratch.direction + r * kSumColumns, tile.width - column);
    }
}

std::int64_t run_unit(const Segment& segment, const Settings& settings, const Unit& unit, std::byte* memory) {
    Scratch scratch;
    Scratch::layout(settings.width, unit.rows, memory, &scratch);
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
            basis += held.position(unit.first_block + k) * width * width;
            not_finite += project(tile, basis, scratch);
            reconstruct(tile, basis, output, scratch);
        };
        if (segment.basis_is_bf16)
            apply(static_cast<const std::uint16_t*>(segment.basis));
        else
            apply(static_cast<const float*>(segment.basis));
    }
    return not_finite;
}

}  // namespace dobb::cpu::DOBB_ISA
