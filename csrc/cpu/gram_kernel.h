// Sums of x_j x_j^T over tokens, written over the vector type of vector_*.h: the lower triangle of one block, in tiles.
#pragma once

namespace dobb::cpu::DOBB_ISA {

constexpr int kGramVectors = kAccumulators >= 24 ? 3 : 2;
constexpr int kGramRows = kAccumulators / kGramVectors;
constexpr int kGramColumns = kGramVectors * kLanes;
constexpr std::int64_t kGramUnit = kGramRows * kGramColumns;  // a multiple of both

// Adds rows `row .. row + kRows` and columns `column .. column + kGramColumns` of sum_t x_t x_t^T, the entries inside of
// `width`, where `x` is [tokens, stride] with zeros up to the stride.
template <int kRows>
DOBB_INLINE void add_tile(const float* x, std::int64_t tokens, std::int64_t stride, std::int64_t row,
                          std::int64_t column, std::int64_t width, float* total) {
    Vector sum[kRows][kGramVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kGramVectors; ++v) sum[r][v] = zero();
    for (std::int64_t t = 0; t < tokens; ++t, x += stride) {
        Vector right[kGramVectors];
        for (int v = 0; v < kGramVectors; ++v) right[v] = load(x + column + v * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vector left = broadcast(x[row + r]);
            for (int v = 0; v < kGramVectors; ++v) sum[r][v] = multiply_add(left, right[v], sum[r][v]);
        }
    }
    for (int r = 0; r < kRows && row + r < width; ++r) {
        float* out = total + (row + r) * width + column;
        float values[kGramColumns];
        for (int v = 0; v < kGramVectors; ++v) store(values + v * kLanes, sum[r][v]);
        for (std::int64_t c = 0; c < kGramColumns && column + c < width; ++c) out[c] += values[c];
    }
}

// Rows first_row .. last_row, bounds that are multiples of kGramUnit, of total [width, width] += sum of x x^T over
// `tokens` rows. `x` is [tokens, stride] fp32, zero beyond the width and
// the stride a multiple of kGramUnit. Only tiles that touch the lower triangle are computed; the
// caller mirrors them.
void add_gram(const float* x, std::int64_t tokens, std::int64_t stride, std::int64_t width, std::int64_t first_row,
              std::int64_t last_row, float* total) {
    for (std::int64_t row = first_row; row < last_row && row < width; row += kGramRows)
        for (std::int64_t column = 0; column < width && column < row + kGramRows; column += kGramColumns)
            add_tile<kGramRows>(x, tokens, stride, row, column, width, total);
}

// Copies `tokens` rows of `width` elements to [tokens, stride] in fp32 with zeros behind.
template <class T>
void widen(const T* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width, std::int64_t stride,
           float* to) {
    for (std::int64_t t = 0; t < tokens; ++t, from += from_stride, to += stride) {
        std::int64_t c = 0;
        for (; c + kLanes <= width; c += kLanes) store(to + c, load(from + c));
        for (; c < width; ++c) to[c] = to_float(from[c]);
        for (; c < stride; ++c) to[c] = 0;
    }
}

void widen_fp32(const float* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width,
                std::int64_t stride, float* to) {
    widen(from, from_stride, tokens, width, stride, to);
}
void widen_bf16(const std::uint16_t* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width,
                std::int64_t stride, float* to) {
    widen(from, from_stride, tokens, width, stride, to);
}

}  // namespace dobb::cpu::DOBB_ISA
