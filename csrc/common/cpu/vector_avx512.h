// Sixteen fp32 lanes in AVX-512 registers. Included under the matching target pragma only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace dobb::cpu::DOBB_ISA {

using Vector = __m512;
constexpr int kLanes = 16;
constexpr int kAccumulators = 24;  // of 32 registers; the rest hold operands

#define DOBB_INLINE inline __attribute__((always_inline))

DOBB_INLINE Vector zero() { return _mm512_setzero_ps(); }
DOBB_INLINE Vector broadcast(float x) { return _mm512_set1_ps(x); }
DOBB_INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
DOBB_INLINE void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
DOBB_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
DOBB_INLINE Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
DOBB_INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
DOBB_INLINE Vector magnitude(Vector x) { return _mm512_abs_ps(x); }
DOBB_INLINE Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
DOBB_INLINE Vector divide(Vector a, Vector b) { return _mm512_div_ps(a, b); }
DOBB_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

DOBB_INLINE Vector load(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// Rounds to nearest even; NaN stays NaN.
DOBB_INLINE void store(std::uint16_t* p, Vector x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    high = _mm512_mask_mov_epi32(high, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

// One bit per lane, the first lane in the lowest bit: whether it is negative.
DOBB_INLINE unsigned negative_lanes(Vector x) {
    return _mm512_cmp_epi32_mask(_mm512_castps_si512(x), _mm512_setzero_si512(), _MM_CMPINT_LT);
}

// One bit per lane: whether it is neither zero nor infinite nor NaN.
DOBB_INLINE unsigned ordinary_lanes(Vector x) {
    const Vector magnitude = _mm512_abs_ps(x);
    const __mmask16 above = _mm512_cmp_ps_mask(magnitude, zero(), _CMP_GT_OQ);
    return _mm512_mask_cmp_ps_mask(above, magnitude, _mm512_set1_ps(3.402823466e38f), _CMP_LE_OQ);
}

}  // namespace dobb::cpu::DOBB_ISA

#include "vector_transpose.h"
