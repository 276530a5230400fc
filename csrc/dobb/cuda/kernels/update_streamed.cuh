// The update of Dobb in one pass over memory, for block widths from 257 to 512, whose basis does not fit into shared
// memory beside the tile: it streams from L2 in slabs of 16 rows, twice for each tile.
//
// A tile is 64 rows of one block. Its eight warps are four groups of 16 rows times two halves of the columns.
//   1. M and G arrive; M is updated and written back, and its bf16 terms go to shared memory.
//   2. C = M Q accumulates in fp32 registers while the slabs of Q pass by: 16 terms of the sums at a time.
//   3. The signs of C go to shared memory, over the first term of M, and from there to the registers of both warps of
//      their rows.
//   4. S Q^T: the rows of a slab of Q are 16 columns of the output. They go from registers into W.
#pragma once

#include "update_fragments.cuh"

namespace dobb::cuda {

// Compiled for widths up to `kSteps` fragments.
template <int kSteps_, int kMomentumTerms_>
struct Streamed {
    static constexpr int kSteps = kSteps_;
    static constexpr int kMomentumTerms = kMomentumTerms_;   // bf16 terms of M: 1, or 2 for exact signs
    static constexpr int kHalf = (kSteps + 1) / 2;           // fragments of columns in C of one warp
    static constexpr int kKept = kSteps < 20 ? kSteps : 20;  // fragments of signs in registers; others are read again
    static constexpr int kRows = 64, kThreads = 256;
    static constexpr int kPitch = kSteps * kFragment + kPitchPadding;
    // In entries: a slab of Q, and a term of the tile, which four slabs replace in step 4.
    static constexpr int kSlab = kFragment * kPitch, kTerm = kRows * kPitch;
    static_assert(kTerm == 4 * kSlab);
    // Two terms of the tile, whatever the number in use, and two slabs.
    static constexpr std::size_t kSharedBytes = kEntryBytes + (2 * kTerm + 2 * kSlab) * sizeof(std::uint16_t);
};

// Starts to bring rows 16 `slab` and following of Q into shared memory, with zeros beyond its end; `permute` as in
// load_basis. Whoever reads them waits for this thread's copies and then for a barrier.
template <class V>
DOBB_DEVICE void stream_slab(const std::uint16_t* basis, int width, int slab, bool permute, std::uint16_t* to) {
    constexpr int kUnit = 8;
    const int units = steps_of(width) * (kFragment / kUnit);
    const bool whole_units = width % kUnit == 0 && reinterpret_cast<std::uintptr_t>(basis) % sizeof(Quad) == 0;
    DOBB_NO_UNROLL for (int i = simt::thread_index(); i < kFragment * units; i += simt::thread_count()) {
        const int inside = i / units, row = slab * kFragment + inside, column = i % units * kUnit;
        std::uint16_t* place = to + (permute ? permuted(inside) : inside) * V::kPitch + column;
        if (whole_units && row < width && column < width)
            simt::copy_async(place, basis + row * width + column);
        else
            DOBB_UNROLL for (int k = 0; k < kUnit; ++k) place[k] =
                row < width && column + k < width ? basis[row * width + column + k] : std::uint16_t{0};
    }
}

// Step 1.
template <class V>
DOBB_DEVICE void load_tile(const Entry& entry, const Rows& rows, std::int64_t first_row, const Settings& settings,
                           std::uint16_t* terms) {
    constexpr int kAtOnce = 4;  // groups of four columns that a thread has on the way
    using Access = Columns<true>;
    const int width = static_cast<int>(settings.width), fours = steps_of(width) * (kFragment / 4);
    for (int begin = simt::thread_index(); begin < V::kRows * fours; begin += kAtOnce * V::kThreads) {
        Raw gradient[kAtOnce], old[kAtOnce];
        const auto row_of = [&](int n) { return (begin + n * V::kThreads) / fours; };
        const auto column_of = [&](int n) { return (begin + n * V::kThreads) % fours * 4; };
        const auto columns = [&](int n) {
            const bool inside = row_of(n) < V::kRows && first_row + row_of(n) < rows.number;
            return inside ? width - column_of(n) : 0;
        };
        const auto position = [&](int n) {
            return (rows.first + (first_row + row_of(n)) * entry.blocks) * width + column_of(n);
        };
        DOBB_UNROLL for (int n = 0; n < kAtOnce; ++n) {
            gradient[n] = Access::read(entry.gradient, entry.gradient_is_bf16, position(n), columns(n));
            old[n] = Access::read(entry.momentum, entry.momentum_is_bf16, position(n), columns(n));
        }
        DOBB_UNROLL for (int n = 0; n < kAtOnce; ++n) {
            Four momentum = Access::to_floats(old[n], entry.momentum_is_bf16);
            const Four source =
                update_momentum(Access::to_floats(gradient[n], entry.gradient_is_bf16), momentum, settings);
            Access::write(entry.momentum, entry.momentum_is_bf16, position(n), momentum, columns(n));
            if (row_of(n) >= V::kRows) continue;
            std::uint32_t low[V::kMomentumTerms], high[V::kMomentumTerms];
            split(source.x[0], source.x[1], low);
            split(source.x[2], source.x[3], high);
            DOBB_UNROLL for (int term = 0; term < V::kMomentumTerms; ++term) *
                reinterpret_cast<Pair*>(terms + term * V::kTerm + row_of(n) * V::kPitch +
                                        column_of(n)) = {{low[term], high[term]}};
        }
    }
}

// Step 2: the warp's half of C for its 16 rows.
template <class V>
DOBB_DEVICE void project_streamed(const std::uint16_t* basis, int width, int first_row, int half,
                                  const std::uint16_t* terms, std::uint16_t* slabs, float (&sums)[2 * V::kHalf][4]) {
    const int lane = simt::thread_index() % simt::kWarp, steps = steps_of(width);
    const int first = half * V::kHalf;
    const std::uint16_t* lane_terms = terms + (first_row + (lane & 15)) * V::kPitch + (lane & 16) / 2;
    const int lane_basis = (lane & 15) * V::kPitch + (lane & 16) / 2 + first * kFragment;
    DOBB_UNROLL for (int n = 0; n < 2 * V::kHalf; ++n) DOBB_UNROLL for (int i = 0; i < 4; ++i) sums[n][i] = 0;
    stream_slab<V>(basis, width, 0, false, slabs);
    simt::copy_async_commit();
    for (int step = 0; step < steps; ++step) {
        simt::copy_async_wait<0>();
        simt::barrier();  // the slab is there, and nobody needs the one before
        if (step + 1 < steps) stream_slab<V>(basis, width, step + 1, false, slabs + (step + 1) % 2 * V::kSlab);
        simt::copy_async_commit();
        const std::uint16_t* slab = slabs + step % 2 * V::kSlab + lane_basis;
        std::uint32_t fragment[V::kMomentumTerms][4];
        DOBB_UNROLL for (int term = 0; term < V::kMomentumTerms; ++term)
            simt::load_matrices(fragment[term], lane_terms + term * V::kTerm + step * kFragment);
        DOBB_UNROLL for (int n = 0; n < V::kHalf; ++n) {
            if (first + n >= steps) break;
            std::uint32_t q[4];
            simt::load_matrices_transposed(q, slab + n * kFragment);
            DOBB_UNROLL for (int term = 0; term < V::kMomentumTerms; ++term) {
                simt::multiply_add_bf16(sums[2 * n], fragment[term], q[0], q[1]);
                simt::multiply_add_bf16(sums[2 * n + 1], fragment[term], q[2], q[3]);
            }
        }
    }
}

// Step 3, to shared memory. Returns how many coefficients of this lane are not finite.
template <class V>
DOBB_DEVICE int put_signs(int width, int first_row, int half, const float (&sums)[2 * V::kHalf][4],
                          std::uint16_t* signs) {
    const int lane = simt::thread_index() % simt::kWarp, padded = steps_of(width) * kFragment;
    int not_finite = 0;
    DOBB_UNROLL for (int n = 0; n < 2 * V::kHalf; ++n) {
        const int column = half * V::kHalf * kFragment + n * 8 + lane % 4 * 2;
        if (column >= padded) continue;
        DOBB_UNROLL for (int row = 0; row < 2; ++row) {
            const float low = sums[n][2 * row], high = sums[n][2 * row + 1];
            not_finite += (column < width && !is_finite(low)) + (column + 1 < width && !is_finite(high));
            *reinterpret_cast<std::uint32_t*>(signs + (first_row + lane / 4 + 8 * row) * V::kPitch + column) =
                simt::pack_bf16(sign_of(low), sign_of(high));
        }
    }
    return not_finite;
}

// Step 4, after the first two slabs have been asked for. The halves of the warps take every other slab.
template <class V>
DOBB_DEVICE void reconstruct_streamed(const Entry& entry, const std::uint16_t* basis, const Tile& tile, int first_row,
                                      int half, float decay, const std::uint16_t* signs, std::uint16_t* slabs) {
    using Access = Columns<true>;
    const int lane = simt::thread_index() % simt::kWarp;
    std::uint32_t kept[V::kKept][4];
    const std::uint16_t* lane_signs = signs + (first_row + (lane & 15)) * V::kPitch + (lane & 16) / 2;
    DOBB_UNROLL for (int k = 0; k < V::kKept; ++k) {
        if (k >= tile.steps) break;
        simt::load_matrices(kept[k], lane_signs + k * kFragment);
    }
    const int lane_basis = ((lane & 16) / 2 + (lane & 7)) * V::kPitch + (lane & 8);
    Raw weight[2];
    DOBB_UNROLL for (int row = 0; row < 2; ++row) weight[row] =
        Access::read(entry.weight, false, tile.position(entry, row, half), tile.columns(row, half));
    for (int first = 0; first < tile.steps; first += 2) {
        const int step = first + half;
        simt::copy_async_wait<0>();
        simt::barrier();
        DOBB_UNROLL for (int i = 0; i < 2; ++i) if (first + 2 + i < tile.steps)
            stream_slab<V>(basis, tile.width, first + 2 + i, true, slabs + (first + 2 + i) % 4 * V::kSlab);
        simt::copy_async_commit();
        if (step >= tile.steps) continue;
        Raw next[2];
        DOBB_UNROLL for (int row = 0; row < 2; ++row) next[row] =
            Access::read(entry.weight, false, tile.position(entry, row, step + 2), tile.columns(row, step + 2));
        const std::uint16_t* slab = slabs + step % 4 * V::kSlab + lane_basis;
        float sums[2][4] = {};
        DOBB_UNROLL for (int k = 0; k < V::kSteps; ++k) {
            if (k >= tile.steps) break;
            std::uint32_t q[4], again[4];
            simt::load_matrices(q, slab + k * kFragment);
            if (k >= V::kKept) simt::load_matrices(again, lane_signs + k * kFragment);
            const auto& signs_k = k < V::kKept ? kept[k % V::kKept] : again;
            simt::multiply_add_bf16(sums[0], signs_k, q[0], q[1]);
            simt::multiply_add_bf16(sums[1], signs_k, q[2], q[3]);
        }
        DOBB_UNROLL for (int row = 0; row < 2; ++row) {
            const Four direction = {{sums[0][2 * row], sums[0][2 * row + 1], sums[1][2 * row], sums[1][2 * row + 1]}};
            update_weight<true>(entry, tile.position(entry, row, step), weight[row], direction, decay,
                                tile.columns(row, step));
            weight[row] = next[row];
        }
    }
}

template <class V>
DOBB_KERNEL(V::kThreads, 1)
streamed_update(OnePass work) {
    Entry& entry = *reinterpret_cast<Entry*>(simt::shared_memory());
    auto* terms = reinterpret_cast<std::uint16_t*>(simt::shared_memory() + kEntryBytes);
    const int warp = simt::thread_index() / simt::kWarp, first_row = warp / 2 * kFragment, half = warp % 2;
    const int width = static_cast<int>(work.settings.width);
    int not_finite = 0;
    for (std::int64_t number = simt::block_index(); number < work.tiles; number += simt::block_count()) {
        simt::barrier();  // nobody needs shared memory before
        if (simt::thread_index() == 0) entry = work.table[entry_of(work.table, work.entries, number)];
        simt::barrier();
        // Found again where it is needed: step 2 leaves no registers to keep it in.
        const auto held = [&] { return static_cast<int>((number - entry.first_tile) / entry.row_tiles); };
        const auto tile_row = [&] { return (number - entry.first_tile) % entry.row_tiles * V::kRows; };
        const auto basis = [&] {
            return static_cast<const std::uint16_t*>(entry.basis) + static_cast<std::int64_t>(held()) * width * width;
        };
        if (tile_row() >= rows_of(entry, held()).number) continue;
        load_tile<V>(entry, rows_of(entry, held()), tile_row(), work.settings, terms);
        {
            float sums[2 * V::kHalf][4];
            project_streamed<V>(basis(), width, first_row, half, terms, terms + 2 * V::kTerm, sums);
            simt::barrier();  // nobody needs the terms
            DOBB_UNROLL for (int i = 0; i < 2; ++i)
                stream_slab<V>(basis(), width, i, true, terms + V::kTerm + i * V::kSlab);
            simt::copy_async_commit();
            not_finite += put_signs<V>(width, first_row, half, sums, terms);
        }
        simt::barrier();
        const Tile tile = tile_of(entry, rows_of(entry, held()), tile_row() + first_row, width);
        reconstruct_streamed<V>(entry, basis(), tile, first_row, half, work.settings.decay, terms, terms + V::kTerm);
    }
    add_to_counter(not_finite, work.not_finite);
}

template <class V>
void launch_streamed(OnePass work, simt::Stream stream) {
    const std::int64_t resident = simt::resident_blocks(&streamed_update<V>, V::kThreads, V::kSharedBytes);
    const std::int64_t most = resident * simt::multiprocessors();
    simt::launch(&streamed_update<V>, static_cast<int>(work.tiles < most ? work.tiles : most), V::kThreads,
                 V::kSharedBytes, stream, work);
}

}  // namespace dobb::cuda
