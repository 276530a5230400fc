#include "warp.h"

#include <cmath>
#include <cstring>
#include <vector>

// Plain arithmetic on local arrays, too slow under sanitizers.
#define DOBB_NOT_SANITIZED __attribute__((no_sanitize("address", "undefined")))

namespace dobb::simt::emulation {
namespace {

float fp16_value(std::uint32_t bits) {
    const std::uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
    if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
    return sign * std::ldexp(static_cast<float>(1024 + fraction), static_cast<int>(exponent) - 25);
}

const float* fp16_values() {
    static const std::vector<float> values = [] {
        std::vector<float> all(1 << 16);
        for (std::uint32_t bits = 0; bits < all.size(); ++bits) all[bits] = fp16_value(bits);
        return all;
    }();
    return values.data();
}

void shuffle_lanes(void* const (&arguments)[kWarp]) {
    for (int lane = 0; lane < kWarp; ++lane) {
        auto& to = *static_cast<Shuffle*>(arguments[lane]);
        to.found = static_cast<Shuffle*>(arguments[(lane ^ to.mask) % kWarp])->value;
    }
}

// PTX ISA, ldmatrix .m8n8.x4.b16: lanes 8 i to 8 i + 7 hold the rows' addresses of matrix i; a lane receives in
// register i the row lane / 4, columns 2 (lane % 4) and the next, of matrix i, or of its transpose.
void load_fragments(void* const (&arguments)[kWarp], bool transposed) {
    for (int matrix = 0; matrix < 4; ++matrix) {
        std::uint16_t entries[8][8];
        for (int row = 0; row < 8; ++row)
            std::memcpy(entries[row], static_cast<LoadMatrices*>(arguments[8 * matrix + row])->row, 16);
        for (int lane = 0; lane < kWarp; ++lane) {
            const int row = lane / 4, column = 2 * (lane % 4);
            const std::uint32_t low = transposed ? entries[column][row] : entries[row][column];
            const std::uint32_t high = transposed ? entries[column + 1][row] : entries[row][column + 1];
            static_cast<LoadMatrices*>(arguments[lane])->x[matrix] = low | high << 16;
        }
    }
}

DOBB_NOT_SANITIZED float truncated(double x) {
    const auto nearest = static_cast<float>(x);
    return std::fabs(static_cast<double>(nearest)) > std::fabs(x) && std::isfinite(nearest)
               ? std::nextafterf(nearest, 0.0f)
               : nearest;
}

// PTX ISA, fragments of mma.m16n8k16 with floating point types. The sum of a product and the accumulator is exact here
// and then cut off, not rounded: tensor cores do about that, and errors that all go one way add up the fastest.
DOBB_NOT_SANITIZED void multiply_add_fragments(void* const (&arguments)[kWarp], const float* fp16) {
    const auto value = [fp16](std::uint32_t bits) DOBB_NOT_SANITIZED -> double {
        return fp16 != nullptr ? fp16[bits & 0xffff] : __builtin_bit_cast(float, (bits & 0xffff) << 16);
    };
    double a[16][16], b[8][16];  // a[m][k], b[n][k]
    for (int lane = 0; lane < kWarp; ++lane) {
        const auto& from = *static_cast<MultiplyAdd*>(arguments[lane]);
        const int group = lane / 4, inside = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = i % 4 < 2 ? group : group + 8, column = 2 * inside + i % 2 + (i < 4 ? 0 : 8);
            a[row][column] = value(from.a[i / 2] >> 16 * (i % 2));
        }
        for (int i = 0; i < 4; ++i)
            b[group][2 * inside + i % 2 + (i < 2 ? 0 : 8)] = value(from.b[i / 2] >> 16 * (i % 2));
    }
    for (int lane = 0; lane < kWarp; ++lane) {
        const auto& to = *static_cast<MultiplyAdd*>(arguments[lane]);
        for (int i = 0; i < 4; ++i) {
            const int row = i < 2 ? lane / 4 : lane / 4 + 8, column = 2 * (lane % 4) + i % 2;
            double sum = to.d[i];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[column][k];
            to.d[i] = truncated(sum);
        }
    }
}

}  // namespace

void run_for_warp(Operation operation, void* const (&arguments)[kWarp]) {
    switch (operation) {
        case Operation::kShuffle:
            return shuffle_lanes(arguments);
        case Operation::kLoadMatrices:
            return load_fragments(arguments, false);
        case Operation::kLoadMatricesTransposed:
            return load_fragments(arguments, true);
        case Operation::kMultiplyAddBf16:
            return multiply_add_fragments(arguments, nullptr);
        case Operation::kMultiplyAddFp16:
            return multiply_add_fragments(arguments, fp16_values());
        case Operation::kBarrier:
        case Operation::kWarpBarrier:
            return;
    }
}

std::uint32_t bf16_bits(float x) {
    if (std::isnan(x)) return 0x7fff;  // as cvt.rn.bf16x2 does
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

std::uint32_t fp16_bits(float x) {
    if (std::isnan(x)) return 0x7fff;
    const std::uint32_t sign = std::bit_cast<std::uint32_t>(x) >> 16 & 0x8000;
    const float magnitude = std::fabs(x);
    if (magnitude < 0x1p-14f)  // steps of 2^-24, rounded to even by the default mode
        return sign | static_cast<std::uint32_t>(std::nearbyint(magnitude * 0x1p24f));
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    const auto bits = std::bit_cast<std::uint32_t>(magnitude) - (112u << 23);
    return sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13;
}

}  // namespace dobb::simt::emulation
