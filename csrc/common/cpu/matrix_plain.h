// The leaf functions of matrix_block.h in plain C++, for tests: AMX tiles as arrays, with the order of the additions
// and the treatment of denormal numbers of TDPBF16PS, or one tile at a time with those of VDPBF16PS. Bit for bit what
// processors with these instructions compute.
#pragma once

#include <cmath>
#include <cstdint>

namespace dobb::cpu::DOBB_ISA {

struct Tile16 {
    float values[16][32];
};

struct MatrixScope {
    static inline int alive = 0;
    MatrixScope() { ++alive; }
    ~MatrixScope() { --alive; }
};

struct MatrixUnit {
    static constexpr int kRowTiles = DOBB_PLAIN_TILES, kColumnTiles = DOBB_PLAIN_TILES;

    float sums[2][2][16][16];
    Tile16 left[2], right[2];

    static float without_denormals(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

    void clear_sums() {
        for (auto& rows : sums)
            for (auto& sum : rows)
                for (auto& row : sum)
                    for (float& value : row) value = 0;
    }

    template <int kTile>
    void load_left(const std::uint16_t* from, std::int64_t stride) {
        for (int r = 0; r < 16; ++r)
            for (int k = 0; k < 32; ++k) left[kTile].values[r][k] = without_denormals(to_float(from[r * stride + k]));
    }

    template <int kTile>
    void load_right(const std::uint16_t* from) {
        for (int p = 0; p < 16; ++p)
            for (int i = 0; i < 32; ++i) right[kTile].values[p][i] = without_denormals(to_float(from[p * 32 + i]));
    }

    static float multiply_add(float a, float b, float sum) { return without_denormals(std::fma(a, b, sum)); }

    template <int kRow, int kColumn>
    void multiply() {
        for (int r = 0; r < 16; ++r)
            for (int c = 0; c < 16; ++c) {
                float& sum = sums[kRow][kColumn][r][c];
                float even = 0, odd = 0;
                for (int p = 0; p < 16; ++p) {
                    const float *a = left[kRow].values[r] + 2 * p, *b = right[kColumn].values[p] + 2 * c;
                    if constexpr (kRowTiles == 1) {
                        sum = multiply_add(a[0], b[0], multiply_add(a[1], b[1], sum));
                    } else {
                        even = multiply_add(a[0], b[0], even);
                        odd = multiply_add(a[1], b[1], odd);
                    }
                }
                if constexpr (kRowTiles > 1) sum = without_denormals(sum + without_denormals(even + odd));
            }
    }

    template <int kRow, int kColumn>
    void store_sum(float* to, std::int64_t stride) {
        for (int r = 0; r < 16; ++r)
            for (int c = 0; c < 16; ++c) to[r * stride + c] = sums[kRow][kColumn][r][c];
    }
};

}  // namespace dobb::cpu::DOBB_ISA
