// One warp's matrix operations, to hold them against plain matrix products.
#include <dobb_simt.h>

#include "harness.h"

namespace dobb::emulation {
namespace {

// d [16, 8] += a [16, 16] b [16, 8], with the fragments taken from memory entry by entry.
DOBB_KERNEL(32, 1) multiplies(float* d, const std::uint16_t* a, const std::uint16_t* b, bool is_bf16) {
    const int r = simt::thread_index() / 4, c = 2 * (simt::thread_index() % 4);
    const auto pair = [](std::uint32_t low, std::uint32_t high) { return low | high << 16; };
    const auto of_a = [&](int row, int column) { return pair(a[16 * row + column], a[16 * row + column + 1]); };
    const auto of_b = [&](int row, int column) { return pair(b[8 * row + column], b[8 * row + 8 + column]); };
    const std::uint32_t left[4] = {of_a(r, c), of_a(r + 8, c), of_a(r, c + 8), of_a(r + 8, c + 8)};
    float sums[4] = {d[8 * r + c], d[8 * r + c + 1], d[8 * r + 64 + c], d[8 * r + 64 + c + 1]};
    if (is_bf16)
        simt::multiply_add_bf16(sums, left, of_b(c, r), of_b(c + 8, r));
    else
        simt::multiply_add_fp16(sums, left, of_b(c, r), of_b(c + 8, r));
    d[8 * r + c] = sums[0];
    d[8 * r + c + 1] = sums[1];
    d[8 * r + 64 + c] = sums[2];
    d[8 * r + 64 + c + 1] = sums[3];
}

// x [4, 8, 8] -> the registers [32 lanes, 4] of a load, each with two entries.
DOBB_KERNEL(32, 1) loads(simt::Quad* registers, const simt::Quad* x, bool transposed) {
    const int lane = simt::thread_index();
    auto* rows = reinterpret_cast<simt::Quad*>(simt::shared_memory());
    rows[lane] = x[lane];
    simt::warp_barrier();
    std::uint32_t found[4];
    if (transposed)
        simt::load_matrices_transposed(found, rows + lane);
    else
        simt::load_matrices(found, rows + lane);
    registers[lane] = {found[0], found[1], found[2], found[3]};
}

DOBB_KERNEL(32, 1) rounds(std::uint32_t* to, const float* from, int count, bool is_bf16) {
    for (int i = simt::thread_index(); i < count; i += simt::thread_count())
        to[i] = is_bf16 ? simt::pack_bf16(from[i], -from[i]) : simt::pack_fp16(from[i], -from[i]);
}

const Operation kMultiplies("multiplies", [](Call& call) {
    simt::launch(multiplies, 1, 32, 0, nullptr, call.data<float>("d"),
                 static_cast<const std::uint16_t*>(call.data<std::uint16_t>("a")),
                 static_cast<const std::uint16_t*>(call.data<std::uint16_t>("b")), call.integer("is_bf16") != 0);
});
const Operation kLoads("loads", [](Call& call) {
    simt::launch(loads, 1, 32, 32 * sizeof(simt::Quad), nullptr, call.data<simt::Quad>("registers"),
                 static_cast<const simt::Quad*>(call.data<simt::Quad>("x")), call.integer("transposed") != 0);
});
const Operation kRounds("rounds", [](Call& call) {
    simt::launch(rounds, 1, 32, 0, nullptr, call.data<std::uint32_t>("to"),
                 static_cast<const float*>(call.data<float>("from")), static_cast<int>(call.integer("count")),
                 call.integer("is_bf16") != 0);
});

}  // namespace
}  // namespace dobb::emulation
