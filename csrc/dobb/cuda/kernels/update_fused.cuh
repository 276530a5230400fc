// The update of Dobb in one pass over memory, for block widths up to 256.
//
// Each block of threads takes an equal share of the tiles, in order, and keeps the basis of its current block in shared
// memory. A warp takes one tile of 16 rows at a time and needs no other warp:
//   1. M and G arrive by asynchronous copies, steps ahead, and reach registers in the layout of the first operand of a
//   tensor-core product. M is updated, written
//      back, and split into bf16 terms: hi, or hi + lo.
//   2. C = M Q accumulates in fp32 registers, the whole width of the block.
//   3. The signs of C are already in the layout of a first operand. S Q^T is formed 16 columns at a time and goes from
//      registers into W.
//
// Columns 4 c .. 4 c + 3 of a row belong to lane c of the row's four, so that one lane reads 16 bytes. A fragment wants
// columns 2 c, 2 c + 1 and 2 c + 8, 2 c + 9 there. The rows of Q in shared memory are permuted within each 16 to make
// up for it: the sum over them in step 2 does not depend on their order, and in step 3 they are the columns of the
// output. The pitch of Q is an odd number of 16-byte units, so that eight rows lie in different banks.
#pragma once

#include "update_fragments.cuh"

namespace dobb::cuda {

// Which products a kernel makes. Each kernel is compiled for widths up to `kSteps` fragments.
template <int kSteps_, int kMomentumTerms_, int kBasisTerms_, bool kUnitColumns_, bool kAligned_>
struct Variant {
    static constexpr int kSteps = kSteps_;
    static constexpr int kMomentumTerms = kMomentumTerms_;  // bf16 terms of M: 1, or 2 for exact signs
    static constexpr int kBasisTerms = kBasisTerms_;        // bf16 terms of Q: 1 for bf16, 2 for fp32
    static constexpr bool kUnitColumns = kUnitColumns_;     // scaled columns instead of signs
    static constexpr bool kAligned = kAligned_;             // four columns can be read and written at once
    using Access = Columns<kAligned>;
    static constexpr int kSignTerms = kUnitColumns ? 2 : 1;
    static constexpr int kPitch = kSteps * kFragment + kPitchPadding;
    // How many blocks of threads share the registers and the shared memory of a multiprocessor: 16 warps for narrow
    // blocks down to 8 for wide ones, whose sums alone take half of the registers.
    static constexpr int kThreads = kSteps <= 8 ? 128 : kSteps <= 12 ? 192 : 256;
    static constexpr bool kUsual = kBasisTerms == 1 && !kUnitColumns && kAligned;
    static constexpr int kResident = !kUsual ? 1 : kSteps <= 4 ? 4 : kSteps <= 8 ? 3 : kSteps <= 12 ? 2 : 1;
};

template <class V>
DOBB_HOST_DEVICE std::size_t basis_end(std::int64_t width) {
    return kEntryBytes +
           static_cast<std::size_t>(steps_of(width)) * kFragment * V::kPitch * V::kBasisTerms * sizeof(std::uint16_t);
}

// Brings the basis of one block into shared memory, with zeros around it up to a multiple of 16.
template <class V>
DOBB_DEVICE void load_basis(const Entry& entry, int held, int width, std::uint16_t* shared) {
    constexpr int kUnit = 8;  // entries in 16 bytes
    const int padded = (width + kFragment - 1) / kFragment * kFragment, units = padded / kUnit;
    const std::int64_t start = static_cast<std::int64_t>(held) * width * width;
    const auto* half = static_cast<const std::uint16_t*>(entry.basis) + start;
    const auto* full = static_cast<const float*>(entry.basis) + start;
    const bool whole_units =
        entry.basis_is_bf16 && width % kUnit == 0 && reinterpret_cast<std::uintptr_t>(half) % sizeof(Quad) == 0;
    for (int i = simt::thread_index(); i < padded * units; i += simt::thread_count()) {
        const int row = i / units, column = i % units * kUnit;
        std::uint16_t* to = shared + permuted(row) * V::kPitch + column;
        if (whole_units && row < width && column < width) {
            simt::copy_async(to, half + row * width + column);
            continue;
        }
        DOBB_UNROLL for (int k = 0; k < kUnit; k += 2) {
            std::uint32_t terms[V::kBasisTerms] = {};
            if (row < width && entry.basis_is_bf16) {
                DOBB_UNROLL for (int e = 0; e < 2; ++e) if (column + k + e < width) terms[0] |=
                    static_cast<std::uint32_t>(half[row * width + column + k + e]) << 16 * e;
            } else if (row < width) {
                float q[2] = {};
                DOBB_UNROLL for (int e = 0; e < 2; ++e) if (column + k + e < width) q[e] =
                    full[row * width + column + k + e];
                split(q[0], q[1], terms);
            }
            DOBB_UNROLL for (int term = 0; term < V::kBasisTerms; ++term) *
                reinterpret_cast<std::uint32_t*>(to + term * padded * V::kPitch + k) = terms[term];
        }
    }
    simt::copy_async_commit();
    simt::copy_async_wait<0>();
}

struct Inputs {
    Raw gradient[2], momentum[2];
};

// Where a warp's G and M of the next steps arrive: for each stage one slot of 16 bytes for each lane and row of G and
// of M. A lane reads what it asked for itself, so that no other thread has to be waited for.
struct Ring {
    static constexpr std::size_t kStageBytes = 4 * simt::kWarp * sizeof(Quad);
    static constexpr int kMost = 4;

    std::byte* lane_slots;
    int stages;  // 1, 2 or 4, and no more than the tile has steps

    DOBB_DEVICE Raw* slot(int step, int array, int row) const {
        return reinterpret_cast<Raw*>(lane_slots + static_cast<std::size_t>(step & (stages - 1)) * kStageBytes) +
               (2 * array + row) * simt::kWarp;
    }
    DOBB_DEVICE static void ask_for(Raw* to, const void* base, bool is_bf16, std::int64_t at) {
        const char* from = static_cast<const char*>(base) + (at << (is_bf16 ? 1 : 2));
        if (is_bf16)
            simt::copy_async_8(to, from);
        else
            simt::copy_async(to, from);
    }
    // Asks for step `slot_step` of the ring, which is step `step` of a tile. One group of copies, empty past the end.
    DOBB_DEVICE void ask(const Entry& entry, const Tile& tile, int slot_step, int step) const {
        DOBB_UNROLL for (int row = 0; row < 2; ++row) {
            if (tile.columns(row, step) <= 0) continue;
            const std::int64_t at = tile.position(entry, row, step);
            ask_for(slot(slot_step, 0, row), entry.gradient, entry.gradient_is_bf16, at);
            ask_for(slot(slot_step, 1, row), entry.momentum, entry.momentum_is_bf16, at);
        }
        simt::copy_async_commit();
    }
    // Waits for the oldest of `stages` groups.
    DOBB_DEVICE void wait() const {
        if (stages == 1)
            simt::copy_async_wait<0>();
        else if (stages == 2)
            simt::copy_async_wait<1>();
        else
            simt::copy_async_wait<kMost - 1>();
    }
    DOBB_DEVICE Inputs take(const Tile& tile, int slot_step, int step) const {
        Inputs inputs = {};
        DOBB_UNROLL for (int row = 0; row < 2; ++row) {
            if (tile.columns(row, step) <= 0) continue;
            inputs.gradient[row] = *slot(slot_step, 0, row);
            inputs.momentum[row] = *slot(slot_step, 1, row);
        }
        return inputs;
    }
};

// Step 1 for 16 columns: the fragment of the first operand, in bf16 terms.
template <class V>
DOBB_DEVICE void take_inputs(const Entry& entry, const Tile& tile, const Settings& settings, int step,
                             const Inputs& inputs, std::uint32_t (&fragment)[V::kMomentumTerms][4]) {
    DOBB_UNROLL for (int row = 0; row < 2; ++row) {
        Four momentum = V::Access::to_floats(inputs.momentum[row], entry.momentum_is_bf16);
        const Four gradient = V::Access::to_floats(inputs.gradient[row], entry.gradient_is_bf16);
        const Four source = update_momentum(gradient, momentum, settings);
        V::Access::write(entry.momentum, entry.momentum_is_bf16, tile.position(entry, row, step), momentum,
                         tile.columns(row, step));
        DOBB_UNROLL for (int half = 0; half < 2; ++half) {
            std::uint32_t terms[V::kMomentumTerms];
            split(source.x[2 * half], source.x[2 * half + 1], terms);
            DOBB_UNROLL for (int term = 0; term < V::kMomentumTerms; ++term) fragment[term][row + 2 * half] =
                terms[term];
        }
    }
}

// Step 2: C of the tile. Aligned inputs have been asked for, and those of the next tile are asked for as slots get
// free; others are read when they are needed. `warps` is how many tiles the next one is further down, `passed` the
// number of steps of earlier tiles.
template <class V>
DOBB_DEVICE void project(const Entry& entry, const Tile& tile, int warps, const Settings& settings,
                         const std::uint16_t* basis, const Ring& ring, int passed, float (&sums)[2 * V::kSteps][4]) {
    const int lane = simt::thread_index() % simt::kWarp, term_size = tile.steps * kFragment * V::kPitch;
    const std::uint16_t* lane_basis = basis + ((lane & 8) + (lane & 7)) * V::kPitch + (lane & 16) / 2;
    DOBB_UNROLL for (int n = 0; n < 2 * V::kSteps; ++n) DOBB_UNROLL for (int i = 0; i < 4; ++i) sums[n][i] = 0;
    DOBB_NO_UNROLL for (int step = 0; step < tile.steps; ++step) {
        std::uint32_t fragment[V::kMomentumTerms][4];
        if constexpr (V::kAligned) {
            ring.wait();
            take_inputs<V>(entry, tile, settings, step, ring.take(tile, passed + step, step), fragment);
            const int ahead = step + ring.stages;
            const bool here = ahead < tile.steps;
            ring.ask(entry, here ? tile : tile.after(entry, warps), passed + ahead, here ? ahead : ahead - tile.steps);
        } else {
            Inputs inputs;
            DOBB_UNROLL for (int row = 0; row < 2; ++row) {
                const std::int64_t at = tile.position(entry, row, step);
                const int columns = tile.columns(row, step);
                inputs.gradient[row] = V::Access::read(entry.gradient, entry.gradient_is_bf16, at, columns);
                inputs.momentum[row] = V::Access::read(entry.momentum, entry.momentum_is_bf16, at, columns);
            }
            take_inputs<V>(entry, tile, settings, step, inputs, fragment);
        }
        DOBB_UNROLL for (int n = 0; n < V::kSteps; ++n) {
            if (n >= tile.steps) break;
            DOBB_UNROLL for (int term = 0; term < V::kBasisTerms; ++term) {
                std::uint32_t q[4];
                simt::load_matrices_transposed(
                    q, lane_basis + term * term_size + step * kFragment * V::kPitch + n * kFragment);
                // The product of the two low terms is below the rounding of the others.
                DOBB_UNROLL for (int m = 0; m < V::kMomentumTerms; ++m) if (m + term < 2) {
                    simt::multiply_add_bf16(sums[2 * n], fragment[m], q[0], q[1]);
                    simt::multiply_add_bf16(sums[2 * n + 1], fragment[m], q[2], q[3]);
                }
            }
        }
    }
}

// From C to the first operand of step 3. Returns how many coefficients of this lane are not finite.
template <class V>
DOBB_DEVICE int keep_signs(const float* column_scales, const Tile& tile, float (&sums)[2 * V::kSteps][4],
                           std::uint32_t (&signs)[V::kSignTerms][V::kSteps][4]) {
    const int pair = simt::thread_index() % 4 * 2;
    int not_finite = 0;
    DOBB_UNROLL for (int n = 0; n < 2 * V::kSteps; ++n) {
        const int column = n * 8 + pair;
        DOBB_UNROLL for (int row = 0; row < 2; ++row) {
            float s[2];
            DOBB_UNROLL for (int e = 0; e < 2; ++e) {
                const float c = sums[n][2 * row + e];
                const bool inside = column + e < tile.width;
                not_finite += inside && !is_finite(c);
                if constexpr (V::kUnitColumns)
                    s[e] = !inside ? 0 : is_finite(c) ? c * column_scales[column + e] : simt::bits_to_float(kNan);
                else
                    s[e] = sign_of(c);
            }
            std::uint32_t terms[V::kSignTerms];
            split(s[0], s[1], terms);
            DOBB_UNROLL for (int term = 0; term < V::kSignTerms; ++term) signs[term][n / 2][row + n % 2 * 2] =
                terms[term];
        }
    }
    return not_finite;
}

// Step 3.
template <class V>
DOBB_DEVICE void reconstruct(const Entry& entry, const Tile& tile, float decay, const std::uint16_t* basis,
                             const std::uint32_t (&signs)[V::kSignTerms][V::kSteps][4]) {
    const int lane = simt::thread_index() % simt::kWarp, term_size = tile.steps * kFragment * V::kPitch;
    const std::uint16_t* lane_basis = basis + ((lane & 16) / 2 + (lane & 7)) * V::kPitch + (lane & 8);
    Raw weight[2];
    DOBB_UNROLL for (int row = 0; row < 2; ++row) weight[row] =
        V::Access::read(entry.weight, false, tile.position(entry, row, 0), tile.columns(row, 0));
    for (int step = 0; step < tile.steps; ++step) {
        Raw next[2];
        DOBB_UNROLL for (int row = 0; row < 2; ++row) next[row] =
            V::Access::read(entry.weight, false, tile.position(entry, row, step + 1), tile.columns(row, step + 1));
        float sums[2][4] = {};
        DOBB_UNROLL for (int k = 0; k < V::kSteps; ++k) {
            if (k >= tile.steps) break;
            DOBB_UNROLL for (int term = 0; term < V::kBasisTerms; ++term) {
                std::uint32_t q[4];
                simt::load_matrices(q, lane_basis + term * term_size + step * kFragment * V::kPitch + k * kFragment);
                DOBB_UNROLL for (int s = 0; s < V::kSignTerms; ++s) if (s + term < 2) {
                    simt::multiply_add_bf16(sums[0], signs[s][k], q[0], q[1]);
                    simt::multiply_add_bf16(sums[1], signs[s][k], q[2], q[3]);
                }
            }
        }
        DOBB_UNROLL for (int row = 0; row < 2; ++row) {
            const Four direction = {{sums[0][2 * row], sums[0][2 * row + 1], sums[1][2 * row], sums[1][2 * row + 1]}};
            update_weight<V::kAligned>(entry, tile.position(entry, row, step), weight[row], direction, decay,
                                       tile.columns(row, step));
            weight[row] = next[row];
        }
    }
}

template <class V>
DOBB_KERNEL(V::kThreads, V::kResident)
fused_update(OnePass work) {
    Entry& entry = *reinterpret_cast<Entry*>(simt::shared_memory());
    auto* basis = reinterpret_cast<std::uint16_t*>(simt::shared_memory() + kEntryBytes);
    const int warp = simt::thread_index() / simt::kWarp, warps = simt::thread_count() / simt::kWarp;
    const int width = static_cast<int>(work.settings.width), lane = simt::thread_index() % simt::kWarp;
    const Ring ring = {simt::shared_memory() + basis_end<V>(width) +
                           static_cast<std::size_t>(warp * work.stages) * Ring::kStageBytes + lane * sizeof(Quad),
                       work.stages};
    const std::int64_t blocks = simt::block_count(), block = simt::block_index();
    const std::int64_t end = work.tiles * (block + 1) / blocks;
    int not_finite = 0;
    for (std::int64_t tile = work.tiles * block / blocks; tile < end;) {
        const Entry& found = work.table[entry_of(work.table, work.entries, tile)];
        simt::barrier();  // nobody needs the entry and the basis before
        if (simt::thread_index() == 0) entry = found;
        simt::barrier();
        const std::int64_t inside = tile - entry.first_tile;
        const int held = static_cast<int>(inside / entry.row_tiles);
        const std::int64_t first = inside % entry.row_tiles;
        const std::int64_t last = first + (end - tile) < entry.row_tiles ? first + (end - tile) : entry.row_tiles;
        const Rows rows = rows_of(entry, held);
        load_basis<V>(entry, held, width, basis);
        simt::barrier();
        // Tiles from `last` on are those of another block of threads.
        const std::int64_t most = last * kTileRows;
        Tile t =
            tile_of(entry, {rows.first, rows.number < most ? rows.number : most}, (first + warp) * kTileRows, width);
        int passed = 0;
        if constexpr (V::kAligned)
            for (int step = 0; step < ring.stages; ++step) ring.ask(entry, t, step, step);
        for (std::int64_t i = first + warp; i < last; i += warps) {
            std::uint32_t signs[V::kSignTerms][V::kSteps][4];
            {
                float sums[2 * V::kSteps][4];
                project<V>(entry, t, warps, work.settings, basis, ring, passed, sums);
                const float* scales = nullptr;
                if constexpr (V::kUnitColumns) scales = entry.column_scales + static_cast<std::int64_t>(held) * width;
                not_finite += keep_signs<V>(scales, t, sums, signs);
            }
            reconstruct<V>(entry, t, work.settings.decay, basis, signs);
            passed += t.steps;
            t = t.after(entry, warps);
        }
        simt::copy_async_wait<0>();  // of groups that are empty, so that the next counts begin anew
        tile += last - first;
    }
    add_to_counter(not_finite, work.not_finite);
}

template <class V>
std::size_t shared_bytes(std::int64_t width, int stages) {
    return basis_end<V>(width) + static_cast<std::size_t>(V::kThreads / simt::kWarp * stages) * Ring::kStageBytes;
}

// As many stages as let kResident blocks share a multiprocessor; at least one.
template <class V>
int stages_of(std::int64_t width) {
    constexpr std::size_t kReserved = 1024;  // of shared memory, for each block
    if (!V::kAligned) return 0;
    const std::size_t mine = (simt::most_shared_memory() + kReserved) / V::kResident - kReserved;
    int stages = Ring::kMost;
    while (stages > 1 && (stages > steps_of(width) || shared_bytes<V>(width, stages) > mine)) stages /= 2;
    return stages;
}

// Explicit instances are shared out to several files, which compile side by side.
template <class V>
void launch_fused(OnePass work, simt::Stream stream) {
    work.stages = stages_of<V>(work.settings.width);
    const std::size_t bytes = shared_bytes<V>(work.settings.width, work.stages);
    const std::int64_t resident = simt::resident_blocks(&fused_update<V>, V::kThreads, bytes);
    constexpr std::int64_t kWarps = V::kThreads / simt::kWarp;
    const std::int64_t useful = (work.tiles + kWarps - 1) / kWarps, most = resident * simt::multiprocessors();
    simt::launch(&fused_update<V>, static_cast<int>(useful < most ? useful : most), V::kThreads, bytes, stream, work);
}

}  // namespace dobb::cuda
