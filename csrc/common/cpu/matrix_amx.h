// The leaf functions of matrix_block.h in AMX tile registers; matrix_plain.h does the same in plain C++ for tests on
// other processors. Included under the matching target pragma only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace dobb::cpu::DOBB_ISA {

// Makes the tile registers of a thread ready while it lives: eight of 16 rows of 64 bytes.
class MatrixScope {
  public:
    MatrixScope() {
        struct alignas(64) {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } configuration;
        static_assert(sizeof configuration == 64, "the layout that ldtilecfg reads");
        _tile_loadconfig(&configuration);
    }
    ~MatrixScope() { _tile_release(); }
    MatrixScope(const MatrixScope&) = delete;
    MatrixScope& operator=(const MatrixScope&) = delete;
};

// Tiles 0 to 3 hold sums, 4 and 5 left and 6 and 7 right operands. The intrinsics want their numbers as literals.
struct MatrixUnit {
    static constexpr int kRowTiles = 2, kColumnTiles = 2;

    DOBB_INLINE void clear_sums() {
        asm volatile("" ::: "memory");  // operands must lie in memory: the compiler does not know what tile loads read
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    // [16, 32] from rows `stride` apart.
    template <int kTile>
    DOBB_INLINE void load_left(const std::uint16_t* from, std::int64_t stride) {
        if constexpr (kTile == 0) _tile_loadd(4, from, stride * 2);
        if constexpr (kTile == 1) _tile_loadd(5, from, stride * 2);
    }

    // [16 pairs, 16, 2], contiguous.
    template <int kTile>
    DOBB_INLINE void load_right(const std::uint16_t* from) {
        if constexpr (kTile == 0) _tile_loadd(6, from, 64);
        if constexpr (kTile == 1) _tile_loadd(7, from, 64);
    }

    template <int kRow, int kColumn>
    DOBB_INLINE void multiply() {
        if constexpr (kRow == 0 && kColumn == 0) _tile_dpbf16ps(0, 4, 6);
        if constexpr (kRow == 0 && kColumn == 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (kRow == 1 && kColumn == 0) _tile_dpbf16ps(2, 5, 6);
        if constexpr (kRow == 1 && kColumn == 1) _tile_dpbf16ps(3, 5, 7);
    }

    // [16, 16] to rows `stride` apart.
    template <int kRow, int kColumn>
    DOBB_INLINE void store_sum(float* to, std::int64_t stride) {
        if constexpr (kRow == 0 && kColumn == 0) _tile_stored(0, to, stride * 4);
        if constexpr (kRow == 0 && kColumn == 1) _tile_stored(1, to, stride * 4);
        if constexpr (kRow == 1 && kColumn == 0) _tile_stored(2, to, stride * 4);
        if constexpr (kRow == 1 && kColumn == 1) _tile_stored(3, to, stride * 4);
    }
};

}  // namespace dobb::cpu::DOBB_ISA
