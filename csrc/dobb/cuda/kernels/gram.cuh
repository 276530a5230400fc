// Sums of x_j x_j^T over tokens on tensor cores, as tiles of the lower triangle of every block.
//
// A block of threads multiplies one tile [64, 64] of one x_j over one part of the tokens, and writes it to scratch
// memory; a second kernel adds the parts in their order. No atomics, so the same call gives the same bits.
#pragma once

#include <dobb_simt.h>

#include <cstddef>
#include <cstdint>

#include "dobb/cuda/gram.h"

namespace dobb::cuda {

constexpr int kGramTile = 64;      // features in a tile's row and column
constexpr int kGramThreads = 128;  // four warps, each a quarter [32, 32] of the tile
constexpr int kTokenTile = 64;     // tokens in shared memory at a time
// Tokens whose products add up in the tensor cores' accumulators before these enter the running sum. Tensor cores cut
// sums off instead of rounding them, so the error grows with the number of additions.
constexpr int kTokensInAccumulator = 512;

// Rows of 64 features lie 72 apart: eight rows, which one fragment load reads, then fall on different banks.
constexpr int kRowStride = kGramTile + 8;
constexpr int kOperandEntries = kTokenTile * kRowStride;
// Two operands, two tiles of tokens each.
constexpr std::size_t kGramSharedBytes = 4 * kOperandEntries * sizeof(std::uint16_t);

// The part of a tile that one thread holds, see multiply_add_bf16.
constexpr int kRowFragments = 2, kColumnFragments = 4, kEntriesInFragment = 4;
constexpr int kEntriesOfThread = kRowFragments * kColumnFragments * kEntriesInFragment;
static_assert(kEntriesOfThread * kGramThreads == kGramTile * kGramTile);

struct TilePlace {
    std::int64_t block;
    int row, column;  // of its first entry in the block
};

// Tiles are numbered block by block, and in a block row by row.
DOBB_DEVICE TilePlace place_of_tile(std::int64_t tile, std::int64_t tiles_in_block) {
    int row = 0;
    std::int64_t inside = tile % tiles_in_block;
    while (inside > row) inside -= ++row;
    return {tile / tiles_in_block, row * kGramTile, static_cast<int>(inside) * kGramTile};
}

struct Entry {
    int row, column;
};

// Where in its tile the thread's entry number `i` lies.
DOBB_DEVICE Entry place_of_entry(int i) {
    const int lane = simt::thread_index() % simt::kWarp, warp = simt::thread_index() / simt::kWarp;
    const int fragment = i / kEntriesInFragment, inside = i % kEntriesInFragment;
    return {warp / 2 * 32 + fragment / kColumnFragments * 16 + inside / 2 * 8 + lane / 4,
            warp % 2 * 32 + fragment % kColumnFragments * 8 + lane % 4 * 2 + inside % 2};
}

// What a block of threads reads: rows `first_token ..` of one x_j, `tokens` of them.
struct TokenRange {
    const std::uint16_t* x;  // first feature of x_j in its first token
    std::int64_t row_stride, tokens;
    int width;
};

// Brings features `feature .. feature + 63` of 64 tokens to shared memory; zeros where there are none. `kByQuads`: all
// rows are aligned to 16 bytes and the width is a multiple of 8.
template <bool kByQuads>
DOBB_DEVICE void load_operand(std::uint16_t* to, const TokenRange& range, std::int64_t token, int feature) {
    constexpr int kAtATime = kByQuads ? 8 : 1, kInRow = kGramTile / kAtATime;
    for (int i = simt::thread_index(); i < kTokenTile * kInRow; i += kGramThreads) {
        const int row = i / kInRow, column = i % kInRow * kAtATime;
        const bool inside = token + row < range.tokens && feature + column < range.width;
        const std::uint16_t* from = range.x + (token + row) * range.row_stride + feature + column;
        std::uint16_t* entry = to + row * kRowStride + column;
        if constexpr (kByQuads) {
            if (inside)
                simt::copy_async(entry, from);
            else
                *reinterpret_cast<simt::Quad*>(entry) = simt::Quad{{0, 0, 0, 0}};
        } else {
            *entry = inside ? *from : std::uint16_t{0};
        }
    }
}

// Features `feature .. feature + 15` of tokens `token .. token + 15`: registers 0 and 1 have tokens 0 to 7 of the lower
// and the upper eight features, 2 and 3 tokens 8 to 15. As it comes, the left operand of a product; registers 0 and 2,
// or 1 and 3, are the right operand for eight features.
DOBB_DEVICE void load_fragment(std::uint32_t (&x)[4], const std::uint16_t* operand, int token, int feature) {
    const int lane = simt::thread_index() % simt::kWarp, matrix = lane / 8;
    simt::load_matrices_transposed(
        x, operand + (token + matrix / 2 * 8 + lane % 8) * kRowStride + feature + matrix % 2 * 8);
}

template <Type kType>
DOBB_DEVICE void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    if constexpr (kType == Type::kBf16)
        simt::multiply_add_bf16(d, a, b0, b1);
    else
        simt::multiply_add_fp16(d, a, b0, b1);
}

template <Type kType>
DOBB_DEVICE void multiply_token_tile(float (&sums)[kRowFragments * kColumnFragments][kEntriesInFragment],
                                     const std::uint16_t* rows, const std::uint16_t* columns) {
    const int warp = simt::thread_index() / simt::kWarp;
    DOBB_UNROLL
    for (int token = 0; token < kTokenTile; token += 16) {
        std::uint32_t left[kRowFragments][4], right[kColumnFragments / 2][4];
        DOBB_UNROLL
        for (int r = 0; r < kRowFragments; ++r) load_fragment(left[r], rows, token, warp / 2 * 32 + r * 16);
        DOBB_UNROLL
        for (int c = 0; c < kColumnFragments / 2; ++c) load_fragment(right[c], columns, token, warp % 2 * 32 + c * 16);
        DOBB_UNROLL
        for (int r = 0; r < kRowFragments; ++r) {
            DOBB_UNROLL
            for (int c = 0; c < kColumnFragments; ++c)
                multiply_add<kType>(sums[r * kColumnFragments + c], left[r], right[c / 2][c % 2],
                                    right[c / 2][c % 2 + 2]);
        }
    }
}

struct GramArguments {
    const std::uint16_t* x;
    std::int64_t tokens, row_stride, width, tiles_in_block;
    std::int64_t first_tile, parts, tokens_in_part;
    float* scratch;  // [tile, part, entry, thread]
};

// Block `tile * parts + part` of the grid: one tile over one part of the tokens.
template <Type kType, bool kByQuads>
DOBB_KERNEL(kGramThreads, 4)
multiply_gram_tile(GramArguments g) {
    const std::int64_t tile = simt::block_index() / g.parts, part = simt::block_index() % g.parts;
    const TilePlace place = place_of_tile(g.first_tile + tile, g.tiles_in_block);
    const std::int64_t first_token = part * g.tokens_in_part, left = g.tokens - first_token;
    const TokenRange range = {g.x + first_token * g.row_stride + place.block * g.width, g.row_stride,
                              left < g.tokens_in_part ? left : g.tokens_in_part, static_cast<int>(g.width)};
    const bool diagonal = place.row == place.column;
    auto* shared = reinterpret_cast<std::uint16_t*>(simt::shared_memory());

    const auto rows_at = [&](int stage) { return shared + stage * 2 * kOperandEntries; };
    const auto columns_at = [&](int stage) { return rows_at(stage) + (diagonal ? 0 : kOperandEntries); };
    const auto load = [&](int stage, std::int64_t token) {
        load_operand<kByQuads>(rows_at(stage), range, token, place.row);
        if (!diagonal) load_operand<kByQuads>(columns_at(stage), range, token, place.column);
    };

    float sums[kRowFragments * kColumnFragments][kEntriesInFragment] = {};
    float totals[kEntriesOfThread] = {};
    const auto to_totals = [&] {
        DOBB_UNROLL
        for (int i = 0; i < kEntriesOfThread; ++i) {
            float& sum = sums[i / kEntriesInFragment][i % kEntriesInFragment];
            totals[i] += sum;
            sum = 0;
        }
    };

    load(0, 0);
    simt::copy_async_commit();
    int stage = 0, tokens_in_sums = 0;
    for (std::int64_t token = 0; token < range.tokens; token += kTokenTile) {
        if (token + kTokenTile < range.tokens) load(stage ^ 1, token + kTokenTile);
        simt::copy_async_commit();
        simt::copy_async_wait<1>();
        simt::barrier();
        multiply_token_tile<kType>(sums, rows_at(stage), columns_at(stage));
        tokens_in_sums += kTokenTile;
        if (tokens_in_sums == kTokensInAccumulator) {
            to_totals();
            tokens_in_sums = 0;
        }
        simt::barrier();  // the next loads go where this tile was
        stage ^= 1;
    }
    to_totals();
    float* to = g.scratch + simt::block_index() * std::int64_t{kGramTile * kGramTile} + simt::thread_index();
    DOBB_UNROLL
    for (int i = 0; i < kEntriesOfThread; ++i) to[i * kGramThreads] = totals[i];
}

// Entries of its tile that one thread adds at a time; the tile's other entries are other blocks' work.
constexpr int kEntriesAdded = 4;
constexpr int kBlocksForTile = kEntriesOfThread / kEntriesAdded;

// Block `tile * kBlocksForTile + i` of the grid: adds a share of a tile's entries over the parts, to both triangles.
static DOBB_KERNEL(kGramThreads, 1) add_gram_tile(float* total, GramArguments g) {
    const std::int64_t tile = simt::block_index() / kBlocksForTile;
    const int first = simt::block_index() % kBlocksForTile * kEntriesAdded;
    const float* from =
        g.scratch + (tile * g.parts * kEntriesOfThread + first) * std::int64_t{kGramThreads} + simt::thread_index();
    float sums[kEntriesAdded] = {};
    for (std::int64_t part = 0; part < g.parts; ++part) {
        DOBB_UNROLL
        for (int i = 0; i < kEntriesAdded; ++i) sums[i] += from[part * (kGramTile * kGramTile) + i * kGramThreads];
    }
    const TilePlace place = place_of_tile(g.first_tile + tile, g.tiles_in_block);
    float* block = total + place.block * g.width * g.width;
    DOBB_UNROLL
    for (int i = 0; i < kEntriesAdded; ++i) {
        const Entry entry = place_of_entry(first + i);
        const std::int64_t row = place.row + entry.row, column = place.column + entry.column;
        if (row >= g.width || column > row) continue;
        const float sum = block[row * g.width + column] + sums[i];
        block[row * g.width + column] = sum;
        block[column * g.width + row] = sum;
    }
}

}  // namespace dobb::cuda
