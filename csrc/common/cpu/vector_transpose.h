// Transposition in AVX2 registers, for the kernels of AVX2 and of AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace dobb::cpu::DOBB_ISA {

// to[c * to_stride + r] = from[r * from_stride + c] for 8 x 8 elements.
template <class T>
DOBB_INLINE void transpose_8x8(const T* from, std::int64_t from_stride, float* to, std::int64_t to_stride) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) {
        if constexpr (sizeof(T) == 2) {
            const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
            r[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
        } else {
            r[i] = _mm256_loadu_ps(from + i * from_stride);
        }
    }
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

}  // namespace dobb::cpu::DOBB_ISA
