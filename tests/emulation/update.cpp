#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "dobb/cuda/update_run.h"
#include "harness.h"

namespace dobb::emulation {
namespace {

float bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

std::vector<Segment> segments_of(Call& call) {
    const auto& starts = Call::find(call.integers, "starts");
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < starts.size(); ++i) {
        const auto flag = [&](const char* name) { return Call::find(call.integers, name)[i] != 0; };
        segments.push_back({call.data<float>("weights", i), call.data<void>("gradients", i),
                            call.data<void>("momenta", i), call.data<void>("bases", i),
                            flag("has_copy") ? call.data<std::uint16_t>("copies", i) : nullptr,
                            call.integer("unit_columns") ? call.data<float>("column_scales", i) : nullptr,
                            Call::find(call.integers, "numel")[i], starts[i], Call::find(call.integers, "columns")[i],
                            static_cast<float>(Call::find(call.numbers, "scales")[i]), flag("gradient_is_bf16"),
                            flag("momentum_is_bf16"), flag("basis_is_bf16")});
    }
    std::erase_if(segments, [](const Segment& s) { return s.numel == 0; });
    return segments;
}

Settings settings_of(const Call& call) {
    return {call.integer("width"), static_cast<float>(call.number("decay")),
            static_cast<float>(1 - call.number("momentum")), call.integer("nesterov") != 0};
}

const Operation kOnePass("update_one_pass", [](Call& call) {
    const std::vector<Segment> segments = segments_of(call);
    const Settings settings = settings_of(call);
    const cuda::Products products = {call.integer("exact") != 0, call.integer("unit_columns") != 0};
    for (const Segment& segment : segments)
        if (!cuda::fits_one_pass(segment, settings.width, products))
            throw std::runtime_error("no one-pass kernel fits");
    const Buffer table(cuda::table_bytes(segments.size()), 0);
    cuda::run_one_pass(segments, settings, products, table.data(), call.data<unsigned long long>("not_finite"),
                       nullptr);
});

// The products that a library computes between the stages: sums [blocks, rows, width] of terms and bases.
void multiply(const Segment& segment, const cuda::Slab& slab, std::int64_t width, bool transposed, int terms) {
    const auto basis = [&](std::int64_t block, std::int64_t row, std::int64_t column) {
        if (transposed) std::swap(row, column);
        const std::int64_t at = ((slab.first_held + block) * width + row) * width + column;
        return segment.basis_is_bf16 ? bf16(static_cast<const std::uint16_t*>(segment.basis)[at])
                                     : static_cast<const float*>(segment.basis)[at];
    };
    for (std::int64_t row = 0; row < std::int64_t{slab.blocks} * slab.rows; ++row)
        for (std::int64_t column = 0; column < width; ++column) {
            double sum = 0;
            for (std::int64_t k = 0; k < width; ++k)
                for (int term = 0; term < (segment.basis_is_bf16 ? terms : 1); ++term) {
                    const void* matrix = slab.terms[term];
                    const float x = segment.basis_is_bf16
                                        ? bf16(static_cast<const std::uint16_t*>(matrix)[row * width + k])
                                        : static_cast<const float*>(matrix)[row * width + k];
                    sum += double{x} * basis(row / slab.rows, k, column);
                }
            slab.sums[row * width + column] = static_cast<float>(sum);
        }
}

const Operation kWide("update_wide", [](Call& call) {
    const Settings settings = settings_of(call);
    const std::int64_t width = settings.width;
    auto* not_finite = call.data<unsigned long long>("not_finite");
    for (const Segment& segment : segments_of(call)) {
        const std::int64_t per_row = segment.columns / width, chunks = segment.numel / width;
        const std::int64_t held = std::min(per_row, chunks), rows = (chunks + per_row - 1) / per_row;
        const std::int64_t most_rows = call.integer("slab_rows"), most_blocks = call.integer("slab_blocks");
        for (std::int64_t row = 0; row < rows; row += most_rows)
            for (std::int64_t block = 0; block < held; block += most_blocks) {
                cuda::Slab slab = {static_cast<int>(block),
                                   static_cast<int>(std::min(most_blocks, held - block)),
                                   row,
                                   static_cast<int>(std::min(most_rows, rows - row)),
                                   {},
                                   nullptr};
                const std::size_t elements = static_cast<std::size_t>(slab.blocks * slab.rows * width);
                const Buffer sums(4 * elements, 0), first((segment.basis_is_bf16 ? 2 : 4) * elements, 0),
                    second(2 * elements, 0);
                slab.sums = reinterpret_cast<float*>(sums.data());
                slab.terms[0] = first.data();
                slab.terms[1] = second.data();
                cuda::run_wide(segment, settings, slab, cuda::WideStage::kMomentum, not_finite, nullptr);
                multiply(segment, slab, width, false, call.integer("exact") ? 2 : 1);
                cuda::run_wide(segment, settings, slab, cuda::WideStage::kSigns, not_finite, nullptr);
                multiply(segment, slab, width, true, segment.column_scales ? 2 : 1);
                cuda::run_wide(segment, settings, slab, cuda::WideStage::kWeights, not_finite, nullptr);
            }
    }
});

}  // namespace
}  // namespace dobb::emulation
