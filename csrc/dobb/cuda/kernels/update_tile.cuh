// Pieces of the update that its CUDA kernels share: four neighbouring columns of a row in and out, and bf16 terms.
#pragma once

#include <dobb_simt.h>

#include <cmath>
#include <cstdint>

#include "dobb/segment.h"
#include "update_table.h"

namespace dobb::cuda {

using simt::Pair;
using simt::Quad;

constexpr std::uint32_t kAbsolute = 0x7fffffffu, kLargestFinite = 0x7f7fffffu, kNan = 0x7fc00000u;
constexpr float kLargestBf16 = 3.3895313892515355e38f;

// Rows of one held block of a segment.
struct Rows {
    std::int64_t first;   // chunk of its first row
    std::int64_t number;  // of rows
};

// `held` is the position of the block's basis.
DOBB_DEVICE Rows rows_of(const Entry& entry, int held) {
    const int block = held < entry.head ? held : held + entry.shift;
    const int first = block - entry.first_block + (block < entry.first_block ? entry.blocks : 0);
    return {first, first < entry.chunks ? (entry.chunks - first + entry.blocks - 1) / entry.blocks : 0};
}

// The last entry whose first tile is not above `tile`.
DOBB_DEVICE int entry_of(const Entry* table, int entries, std::int64_t tile) {
    int low = 0, high = entries - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table[middle].first_tile <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Up to four neighbouring columns as they lie in memory: fp32 words, or bf16, packed by twos where they were read at
// once and one to a word elsewhere. Conversion waits for the memory, so it is kept apart from reading.
struct Raw {
    std::uint32_t x[4];
};

struct Four {
    float x[4];
};

// Reading and writing four neighbouring columns of which the first `columns` are inside the block: none, or all four
// at once if `kAligned`; one by one otherwise. Outside, zeros are read and nothing is written.
template <bool kAligned>
struct Columns {
    static DOBB_DEVICE Raw read(const void* base, bool is_bf16, std::int64_t at, int columns) {
        Raw raw = {};
        if (columns <= 0) return raw;
        const char* from = static_cast<const char*>(base) + (at << (is_bf16 ? 1 : 2));
        if constexpr (kAligned) {
            if (is_bf16) {
                const Pair found = simt::load_once(reinterpret_cast<const Pair*>(from));
                raw.x[0] = found.x[0];
                raw.x[1] = found.x[1];
            } else {
                const Quad found = simt::load_once(reinterpret_cast<const Quad*>(from));
                DOBB_UNROLL for (int i = 0; i < 4; ++i) raw.x[i] = found.x[i];
            }
        } else if (is_bf16) {
            DOBB_UNROLL for (int i = 0; i < 4; ++i) if (i < columns) raw.x[i] =
                simt::load_once(reinterpret_cast<const std::uint16_t*>(from) + i);
        } else {
            DOBB_UNROLL for (int i = 0; i < 4; ++i) if (i < columns) raw.x[i] =
                simt::load_once(reinterpret_cast<const std::uint32_t*>(from) + i);
        }
        return raw;
    }

    static DOBB_DEVICE Four to_floats(const Raw& raw, bool is_bf16) {
        Four four;
        DOBB_UNROLL for (int i = 0; i < 4; ++i) {
            const std::uint32_t packed =
                kAligned ? i % 2 ? raw.x[i / 2] & 0xffff0000u : raw.x[i / 2] << 16 : raw.x[i] << 16;
            four.x[i] = simt::bits_to_float(is_bf16 ? packed : raw.x[i]);
        }
        return four;
    }

    static DOBB_DEVICE void write(void* base, bool is_bf16, std::int64_t at, const Four& four, int columns) {
        if (columns <= 0) return;
        char* to = static_cast<char*>(base) + (at << (is_bf16 ? 1 : 2));
        if (is_bf16) {
            const Pair packed = {{simt::pack_bf16(four.x[0], four.x[1]), simt::pack_bf16(four.x[2], four.x[3])}};
            if constexpr (kAligned) {
                simt::store_once(reinterpret_cast<Pair*>(to), packed);
            } else {
                DOBB_UNROLL for (int i = 0; i < 4; ++i) if (i < columns)
                    simt::store_once(reinterpret_cast<std::uint16_t*>(to) + i,
                                     static_cast<std::uint16_t>(packed.x[i / 2] >> (i % 2 * 16)));
            }
        } else {
            Quad bits;
            DOBB_UNROLL for (int i = 0; i < 4; ++i) bits.x[i] = simt::float_to_bits(four.x[i]);
            if constexpr (kAligned) {
                simt::store_once(reinterpret_cast<Quad*>(to), bits);
            } else {
                DOBB_UNROLL for (int i = 0; i < 4; ++i) if (i < columns)
                    simt::store_once(reinterpret_cast<std::uint32_t*>(to) + i, bits.x[i]);
            }
        }
    }
};

// M <- mu M + (1 - mu) G in `momentum`; returns what is projected.
DOBB_DEVICE Four update_momentum(const Four& gradient, Four& momentum, const Settings& settings) {
    Four source;
    DOBB_UNROLL for (int i = 0; i < 4; ++i) {
        const float g = gradient.x[i], old = momentum.x[i];
        const float updated = fmaf(settings.gradient_weight, g - old, old);
        momentum.x[i] = updated;
        source.x[i] = settings.nesterov ? fmaf(settings.gradient_weight, g - updated, updated) : updated;
    }
    return source;
}

// W <- decay W - scale O, and its bf16 copy if there is one.
template <bool kAligned>
DOBB_DEVICE void update_weight(const Entry& entry, std::int64_t at, const Raw& old, const Four& direction, float decay,
                               int columns) {
    Four weight = Columns<kAligned>::to_floats(old, false);
    DOBB_UNROLL for (int i = 0; i < 4; ++i) weight.x[i] = fmaf(-entry.scale, direction.x[i], decay * weight.x[i]);
    Columns<kAligned>::write(entry.weight, false, at, weight, columns);
    if (entry.copy) Columns<kAligned>::write(entry.copy, true, at, weight, columns);
}

// Two values as packed bf16 terms: the first their rounded values, the second what that left out. The first must stay
// finite next to the fp32 maximum; of an infinity or NaN the second term is not finite, which is enough.
template <int kTerms>
DOBB_DEVICE void split(float low, float high, std::uint32_t (&terms)[kTerms]) {
    if constexpr (kTerms == 1) {
        terms[0] = simt::pack_bf16(low, high);
    } else {
        const float a = fminf(fmaxf(low, -kLargestBf16), kLargestBf16);
        const float b = fminf(fmaxf(high, -kLargestBf16), kLargestBf16);
        terms[0] = simt::pack_bf16(a, b);
        terms[1] = simt::pack_bf16(low - simt::bits_to_float(terms[0] << 16),
                                   high - simt::bits_to_float(terms[0] & 0xffff0000u));
    }
}

DOBB_DEVICE bool is_finite(float x) { return (simt::float_to_bits(x) & kAbsolute) <= kLargestFinite; }

// The sign, with sign(0) = 0; NaN for what is not finite.
DOBB_DEVICE float sign_of(float x) {
    const std::uint32_t bits = simt::float_to_bits(x), magnitude = bits & kAbsolute;
    const std::uint32_t one = (bits & ~kAbsolute) | 0x3f800000u;
    const std::uint32_t result = magnitude > kLargestFinite ? kNan : magnitude == 0 ? 0u : one;
    return simt::bits_to_float(result);
}

// Adds the lanes' counts to a counter in the GPU's memory. Integers, so that the order does not matter.
DOBB_DEVICE void add_to_counter(int count, unsigned long long* counter) {
    DOBB_UNROLL for (int mask = simt::kWarp / 2; mask > 0; mask /= 2) count += simt::shuffle_xor(count, mask);
    if (simt::thread_index() % simt::kWarp == 0 && count != 0)
        simt::atomic_add(counter, static_cast<unsigned long long>(count));
}

}  // namespace dobb::cuda
