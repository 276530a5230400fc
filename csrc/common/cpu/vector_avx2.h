// Eight fp32 lanes in AVX2 registers. Included under the matching target pragma only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace dobb::cpu::DOBB_ISA {

using Vector = __m256;
constexpr int kLanes = 8;
constexpr int kAccumulators = 12;  // of 16 registers; the rest hold operands

#define DOBB_INLINE inline __attribute__((always_inline))

DOBB_INLINE Vector zero() { return _mm256_setzero_ps(); }
DOBB_INLINE Vector broadcast(float x) { return _mm256_set1_ps(x); }
DOBB_INLINE Vector load(const float* p) { return _mm256_loadu_ps(p); }
DOBB_INLINE void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
DOBB_INLINE Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
DOBB_INLINE Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
DOBB_INLINE Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
DOBB_INLINE Vector magnitude(Vector x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
DOBB_INLINE Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }
DOBB_INLINE Vector divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
DOBB_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

DOBB_INLINE Vector load(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

// Rounds to nearest even; NaN stays NaN.
DOBB_INLINE void store(std::uint16_t* p, Vector x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    high = _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), is_nan);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

// One bit per lane, the first lane in the lowest bit: whether it is negative.
DOBB_INLINE unsigned negative_lanes(Vector x) { return static_cast<unsigned>(_mm256_movemask_ps(x)); }

// One bit per lane: whether it is neither zero nor infinite nor NaN.
DOBB_INLINE unsigned ordinary_lanes(Vector x) {
    const Vector magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    const Vector above = _mm256_cmp_ps(magnitude, zero(), _CMP_GT_OQ);
    const Vector below = _mm256_cmp_ps(magnitude, _mm256_set1_ps(3.402823466e38f), _CMP_LE_OQ);
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_and_ps(above, below)));
}

}  // namespace dobb::cpu::DOBB_ISA

#include "vector_transpose.h"
