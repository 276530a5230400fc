// The update of Dobb for blocks so wide that the arithmetic bound passes the memory bound: three elementwise kernels
// around the matrix products of a library.
//
// Rows of a slab that lie past the segment's end are zeros on the way in, and dropped on the way out.
#pragma once

#include "dobb/cuda/update_run.h"
#include "update_tile.cuh"

namespace dobb::cuda {

struct WideWork {
    Entry entry;
    Settings settings;
    Slab slab;
    unsigned long long* not_finite;
};

// Calls function(element in scratch, element in the segment or -1 for a row past the end, columns, held block, column)
// for all groups of four columns.
template <class Function>
DOBB_DEVICE void for_each_four(const WideWork& work, Function function) {
    const int width = static_cast<int>(work.settings.width);
    const Slab& slab = work.slab;
    for (int i = simt::block_index(); i < slab.blocks * slab.rows; i += simt::block_count()) {
        const int held = slab.first_held + i / slab.rows;
        const std::int64_t row = slab.first_row + i % slab.rows;
        const Rows rows = rows_of(work.entry, held);
        const std::int64_t in_scratch = static_cast<std::int64_t>(i) * width;
        const std::int64_t in_segment =
            row < rows.number ? (rows.first + row * work.entry.blocks) * width : std::int64_t{-1};
        for (int column = 4 * simt::thread_index(); column < width; column += 4 * simt::thread_count())
            function(in_scratch + column, in_segment < 0 ? in_segment : in_segment + column, width - column, held,
                     column);
    }
}

// Writes four values as one fp32 matrix, or as `kTerms` bf16 terms.
template <bool kAligned, int kTerms>
DOBB_DEVICE void write_terms(const WideWork& work, std::int64_t at, const Four& four, int columns) {
    if (!work.entry.basis_is_bf16) {
        Columns<kAligned>::write(work.slab.terms[0], false, at, four, columns);
        return;
    }
    Four terms[kTerms];
    DOBB_UNROLL for (int pair = 0; pair < 2; ++pair) {
        std::uint32_t packed[kTerms];
        split(four.x[2 * pair], four.x[2 * pair + 1], packed);
        DOBB_UNROLL for (int term = 0; term < kTerms; ++term) {
            terms[term].x[2 * pair] = simt::bits_to_float(packed[term] << 16);
            terms[term].x[2 * pair + 1] = simt::bits_to_float(packed[term] & 0xffff0000u);
        }
    }
    DOBB_UNROLL for (int term = 0; term < kTerms; ++term)
        Columns<kAligned>::write(work.slab.terms[term], true, at, terms[term], columns);
}

template <bool kAligned>
DOBB_KERNEL(128, 4)
wide_momentum(WideWork work) {
    using Access = Columns<kAligned>;
    const Entry& entry = work.entry;
    for_each_four(work, [&](std::int64_t scratch, std::int64_t at, int columns, int, int) {
        const int inside = at < 0 ? 0 : columns;
        const Raw gradient = Access::read(entry.gradient, entry.gradient_is_bf16, at, inside);
        const Raw old = Access::read(entry.momentum, entry.momentum_is_bf16, at, inside);
        Four momentum = Access::to_floats(old, entry.momentum_is_bf16);
        const Four source =
            update_momentum(Access::to_floats(gradient, entry.gradient_is_bf16), momentum, work.settings);
        Access::write(entry.momentum, entry.momentum_is_bf16, at, momentum, inside);
        write_terms<kAligned, 2>(work, scratch, source, columns);
    });
}

template <bool kAligned>
DOBB_KERNEL(128, 4)
wide_signs(WideWork work) {
    const int width = static_cast<int>(work.settings.width);
    int not_finite = 0;
    for_each_four(work, [&](std::int64_t scratch, std::int64_t, int columns, int held, int column) {
        const Four sums =
            Columns<kAligned>::to_floats(Columns<kAligned>::read(work.slab.sums, false, scratch, columns), false);
        Four signs = {};
        DOBB_UNROLL for (int i = 0; i < 4; ++i) {
            if (i >= columns) continue;
            const bool finite = is_finite(sums.x[i]);
            not_finite += !finite;
            if (!work.entry.column_scales)
                signs.x[i] = sign_of(sums.x[i]);
            else
                signs.x[i] = finite ? sums.x[i] * work.entry.column_scales[std::int64_t{held} * width + column + i]
                                    : simt::bits_to_float(kNan);
        }
        if (work.entry.column_scales)
            write_terms<kAligned, 2>(work, scratch, signs, columns);
        else
            write_terms<kAligned, 1>(work, scratch, signs, columns);
    });
    add_to_counter(not_finite, work.not_finite);
}

template <bool kAligned>
DOBB_KERNEL(128, 4)
wide_weights(WideWork work) {
    using Access = Columns<kAligned>;
    for_each_four(work, [&](std::int64_t scratch, std::int64_t at, int columns, int, int) {
        const int inside = at < 0 ? 0 : columns;
        const Raw old = Access::read(work.entry.weight, false, at, inside);
        const Four direction = Access::to_floats(Access::read(work.slab.sums, false, scratch, columns), false);
        update_weight<kAligned>(work.entry, at, old, direction, work.settings.decay, inside);
    });
}

}  // namespace dobb::cuda
