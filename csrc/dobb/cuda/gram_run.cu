#include <algorithm>

#include "dobb/cuda/kernels/gram.cuh"

namespace dobb::cuda {
namespace {

constexpr std::int64_t kTileBytes = kGramTile * kGramTile * sizeof(float);
constexpr std::int64_t kMostScratchBytes = std::int64_t{16} << 20;
constexpr std::int64_t kMostTiles = kMostScratchBytes / kTileBytes;
constexpr std::int64_t kFewestTokensInPart = 256;  // fewer, and writing the tile costs more than multiplying it

std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t tiles_in_block(std::int64_t width) {
    const std::int64_t side = ceil_divide(width, kGramTile);
    return side * (side + 1) / 2;
}

bool by_quads(const Activations& x, std::int64_t width) {
    return reinterpret_cast<std::uintptr_t>(x.data) % sizeof(simt::Quad) == 0 && x.row_stride % 8 == 0 &&
           width % 8 == 0;
}

using MultiplyKernel = void (*)(GramArguments);

MultiplyKernel choose_kernel(const Activations& x, std::int64_t width) {
    if (x.type == Type::kBf16)
        return by_quads(x, width) ? multiply_gram_tile<Type::kBf16, true> : multiply_gram_tile<Type::kBf16, false>;
    return by_quads(x, width) ? multiply_gram_tile<Type::kFp16, true> : multiply_gram_tile<Type::kFp16, false>;
}

}  // namespace

GramPlan plan_gram(const Activations& x, std::int64_t width) {
    GramPlan plan{};
    plan.tiles = x.features / width * tiles_in_block(width);
    if (plan.tiles == 0 || x.tokens == 0) return plan;
    const std::int64_t at_once =
        std::min<std::int64_t>(std::int64_t{simt::multiprocessors()} *
                                   simt::resident_blocks(choose_kernel(x, width), kGramThreads, kGramSharedBytes),
                               kMostTiles);
    const std::int64_t most_parts = ceil_divide(x.tokens, kFewestTokensInPart);
    const std::int64_t parts = std::clamp<std::int64_t>(at_once / plan.tiles, 1, most_parts);
    plan.tokens_in_part = ceil_divide(ceil_divide(x.tokens, parts), kTokenTile) * kTokenTile;
    plan.parts = ceil_divide(x.tokens, plan.tokens_in_part);
    plan.tiles_at_a_time = std::min(plan.tiles, kMostTiles / plan.parts);
    plan.scratch_bytes = static_cast<std::size_t>(plan.tiles_at_a_time * plan.parts * kTileBytes);
    return plan;
}

void add_gram(float* total, const Activations& x, std::int64_t width, const GramPlan& plan, void* scratch,
              void* stream) {
    if (plan.tiles == 0 || x.tokens == 0) return;
    GramArguments arguments{static_cast<const std::uint16_t*>(x.data),
                            x.tokens,
                            x.row_stride,
                            width,
                            tiles_in_block(width),
                            0,
                            plan.parts,
                            plan.tokens_in_part,
                            static_cast<float*>(scratch)};
    const auto on = static_cast<simt::Stream>(stream);
    for (; arguments.first_tile < plan.tiles; arguments.first_tile += plan.tiles_at_a_time) {
        const auto tiles = static_cast<int>(std::min(plan.tiles_at_a_time, plan.tiles - arguments.first_tile));
        simt::launch(choose_kernel(x, width), tiles * static_cast<int>(plan.parts), kGramThreads, kGramSharedBytes, on,
                     arguments);
        simt::launch(add_gram_tile, tiles * kBlocksForTile, kGramThreads, 0, on, total, arguments);
    }
}

}  // namespace dobb::cuda
