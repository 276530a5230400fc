// The leaf functions of matrix_block.h with the dot product of AVX512-BF16: sixteen rows of sums in registers;
// matrix_plain.h does the same in plain C++ for tests on other processors. Included under the matching target pragma
// only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace dobb::cpu::DOBB_ISA {

struct MatrixScope {
    MatrixScope() {}  // nothing to make ready
};

struct MatrixUnit {
    static constexpr int kRowTiles = 1, kColumnTiles = 1;

    __m512 sum[16];
    const std::uint16_t *left, *right;
    std::int64_t left_stride;

    DOBB_INLINE void clear_sums() {
        for (int r = 0; r < 16; ++r) sum[r] = _mm512_setzero_ps();
    }

    // Operands stay in memory until they are multiplied: left [16, 32] in rows `stride` apart.
    template <int kTile>
    DOBB_INLINE void load_left(const std::uint16_t* from, std::int64_t stride) {
        left = from;
        left_stride = stride;
    }

    // [16 pairs, 16, 2], contiguous.
    template <int kTile>
    DOBB_INLINE void load_right(const std::uint16_t* from) {
        right = from;
    }

    template <int kRow, int kColumn>
    DOBB_INLINE void multiply() {
        for (int pair = 0; pair < 16; ++pair) {
            const __m512bh columns = reinterpret_cast<__m512bh>(_mm512_loadu_si512(right + pair * 32));
            for (int r = 0; r < 16; ++r) {
                std::int32_t both;
                std::memcpy(&both, left + r * left_stride + pair * 2, sizeof both);
                sum[r] = _mm512_dpbf16_ps(sum[r], reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)), columns);
            }
        }
    }

    // [16, 16] to rows `stride` apart.
    template <int kRow, int kColumn>
    DOBB_INLINE void store_sum(float* to, std::int64_t stride) {
        for (int r = 0; r < 16; ++r) _mm512_storeu_ps(to + r * stride, sum[r]);
    }
};

}  // namespace dobb::cpu::DOBB_ISA
