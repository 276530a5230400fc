// Single numbers in fp32 and bf16, rounded as the vectors of vector_*.h round them.
#pragma once

namespace dobb::cpu::DOBB_ISA {

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

}  // namespace dobb::cpu::DOBB_ISA
