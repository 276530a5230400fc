// Sums of x_j x_j^T over tokens, written over the vector type of vector_*.h: the lower triangle of one block, in tiles.
// Activations come in panels of kGramColumns features, [panels, tokens, kGramColumns] in fp32 with zeros beyond the
// width, so that a panel of a few hundred tokens stays in L1 while all rows pass over it.
#pragma once

namespace dobb::cpu::DOBB_ISA {

constexpr int kGramVectors = 3;
constexpr int kGramRows = kAccumulators / kGramVectors;
constexpr int kGramColumns = kGramVectors * kLanes;
static_assert(kGramColumns % kGramRows == 0, "the rows of a tile lie in one panel");

// Adds rows `row .. row + kGramRows` and the columns of panel `panel` of sum_t x_t x_t^T to total [width, width].
DOBB_INLINE void add_tile(const float* x, std::int64_t tokens, std::int64_t row, std::int64_t panel, std::int64_t width,
                          float* total) {
    Vector sum[kGramRows][kGramVectors];
    for (int r = 0; r < kGramRows; ++r)
        for (int v = 0; v < kGramVectors; ++v) sum[r][v] = zero();
    const float* left = x + row / kGramColumns * tokens * kGramColumns + row % kGramColumns;
    const float* right = x + panel * tokens * kGramColumns;
    add_products(left, 1, kGramColumns, right, tokens, sum);
    const std::int64_t column = panel * kGramColumns;
    for (int r = 0; r < kGramRows && row + r < width; ++r) {
        float* out = total + (row + r) * width + column;
        if (column + kGramColumns <= width) {
            for (int v = 0; v < kGramVectors; ++v) store(out + v * kLanes, add(load(out + v * kLanes), sum[r][v]));
            continue;
        }
        float values[kGramColumns];
        for (int v = 0; v < kGramVectors; ++v) store(values + v * kLanes, sum[r][v]);
        for (std::int64_t c = 0; column + c < width; ++c) out[c] += values[c];
    }
}

// Rows first_row .. last_row, bounds that are multiples of kGramColumns, of total [width, width] += sum of x x^T over
// `tokens` rows. Only tiles that touch the lower triangle are computed; the caller mirrors it.
void add_gram(const float* x, std::int64_t tokens, std::int64_t width, std::int64_t first_row, std::int64_t last_row,
              float* total) {
    for (std::int64_t panel = 0; panel * kGramColumns < last_row && panel * kGramColumns < width; ++panel) {
        const std::int64_t start = panel * kGramColumns > first_row ? panel * kGramColumns : first_row;
        for (std::int64_t row = start; row < last_row && row < width; row += kGramRows)
            add_tile(x, tokens, row, panel, width, total);
    }
}

// Copies `tokens` rows of `width` features to panels.
template <class T>
void widen(const T* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width, float* to) {
    for (std::int64_t first = 0; first < width; first += kGramColumns) {
        const std::int64_t inside = width - first < kGramColumns ? width - first : kGramColumns;
        for (std::int64_t t = 0; t < tokens; ++t, to += kGramColumns) {
            const T* features = from + t * from_stride + first;
            std::int64_t c = 0;
            for (; c + kLanes <= inside; c += kLanes) store(to + c, load(features + c));
            for (; c < inside; ++c) to[c] = to_float(features[c]);
            for (; c < kGramColumns; ++c) to[c] = 0;
        }
    }
}

void widen_fp32(const float* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width, float* to) {
    widen(from, from_stride, tokens, width, to);
}
void widen_bf16(const std::uint16_t* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width,
                float* to) {
    widen(from, from_stride, tokens, width, to);
}

}  // namespace dobb::cpu::DOBB_ISA
