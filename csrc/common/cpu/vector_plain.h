// Four fp32 lanes in the compiler's own vector type: SSE2 on x86-64, NEON on Arm.
#pragma once

#include <cstdint>
#include <cstring>

namespace dobb::cpu::DOBB_ISA {

typedef float Vector __attribute__((vector_size(16)));
typedef std::uint32_t Bits __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kAccumulators = 12;  // of 16 registers; the rest hold operands

#define DOBB_INLINE inline __attribute__((always_inline))

DOBB_INLINE Vector zero() { return Vector{0, 0, 0, 0}; }
DOBB_INLINE Vector broadcast(float x) { return Vector{x, x, x, x}; }
DOBB_INLINE Vector load(const float* p) {
    Vector x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
DOBB_INLINE void store(float* p, Vector x) { std::memcpy(p, &x, sizeof x); }
DOBB_INLINE Vector add(Vector a, Vector b) { return a + b; }
DOBB_INLINE Vector subtract(Vector a, Vector b) { return a - b; }
DOBB_INLINE Vector multiply(Vector a, Vector b) { return a * b; }
DOBB_INLINE Vector magnitude(Vector x) { return reinterpret_cast<Vector>(reinterpret_cast<Bits>(x) & 0x7fffffffu); }
DOBB_INLINE Vector smaller(Vector a, Vector b) { return a < b ? a : b; }
DOBB_INLINE Vector divide(Vector a, Vector b) { return a / b; }
DOBB_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }

DOBB_INLINE Vector load(const std::uint16_t* p) {
    const Bits bits = {p[0], p[1], p[2], p[3]};
    return reinterpret_cast<Vector>(bits << 16);
}

// Rounds to nearest even; NaN stays NaN.
DOBB_INLINE void store(std::uint16_t* p, Vector x) {
    const Bits bits = reinterpret_cast<Bits>(x);
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    for (int i = 0; i < kLanes; ++i) p[i] = x[i] == x[i] ? static_cast<std::uint16_t>(rounded[i]) : 0x7fc0;
}

// One bit per lane, the first lane in the lowest bit: whether it is negative.
DOBB_INLINE unsigned negative_lanes(Vector x) {
    const Bits top = reinterpret_cast<Bits>(x) >> 31;
    return top[0] | top[1] << 1 | top[2] << 2 | top[3] << 3;
}

// One bit per lane: whether it is neither zero nor infinite nor NaN.
DOBB_INLINE unsigned ordinary_lanes(Vector x) {
    const Bits magnitude = reinterpret_cast<Bits>(x) & 0x7fffffffu;
    unsigned lanes = 0;
    for (int i = 0; i < kLanes; ++i) lanes |= unsigned{magnitude[i] - 1 < 0x7f7fffffu} << i;
    return lanes;
}

// to[c * to_stride + r] = from[r * from_stride + c] for 8 x 8 elements.
template <class T>
DOBB_INLINE void transpose_8x8(const T* from, std::int64_t from_stride, float* to, std::int64_t to_stride) {
    for (int r = 0; r < 8; ++r)
        for (int c = 0; c < 8; c += kLanes) {
            const Vector x = load(from + r * from_stride + c);
            for (int i = 0; i < kLanes; ++i) to[(c + i) * to_stride + r] = x[i];
        }
}

}  // namespace dobb::cpu::DOBB_ISA
