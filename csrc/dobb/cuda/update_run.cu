#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

#include "dobb/cuda/instantiations/update_instances.h"
#include "dobb/cuda/kernels/update_wide.cuh"
#include "update_run.h"

namespace dobb::cuda {
namespace {

// The table travels as parameters of small kernels: no copy whose source must outlive the call, also when the launches
// are replayed from a graph.
struct Pack {
    static constexpr std::size_t kBytes = 3840;  // kernels take 4 KB of parameters everywhere
    static constexpr std::size_t kEntries = kBytes / sizeof(Entry);
    Entry entries[kEntries];
};

DOBB_KERNEL(128, 1)
write_entries(Pack pack, int count, Entry* to) {
    constexpr int kWords = sizeof(Entry) / sizeof(std::uint32_t);
    for (int i = simt::thread_index(); i < count * kWords; i += simt::thread_count())
        reinterpret_cast<std::uint32_t*>(to)[i] = reinterpret_cast<const std::uint32_t*>(pack.entries)[i];
}

void write_table(const Table& table, Entry* to, simt::Stream stream) {
    for (std::size_t i = 0; i < table.entries.size(); i += Pack::kEntries) {
        Pack pack = {};
        const std::size_t count = std::min(Pack::kEntries, table.entries.size() - i);
        std::copy_n(table.entries.begin() + static_cast<std::ptrdiff_t>(i), count, pack.entries);
        simt::launch(&write_entries, 1, 128, 0, stream, pack, static_cast<int>(count), to + i);
    }
}

struct Choice {
    int tile_rows;
    std::size_t shared_bytes;
    void (*launch)(OnePass, simt::Stream);
};

struct Kind {
    Products products;
    bool basis_is_bf16, aligned;

    bool signs_bf16() const { return basis_is_bf16 && aligned && !products.unit_columns; }
};

template <int kSteps>
struct FusedSignsBf16 {
    static Choice choose(std::int64_t width, const Kind& kind) {
        const auto of = [&]<class V>(V) {
            return Choice{kTileRows, shared_bytes<V>(width, V::kAligned), &launch_fused<V>};
        };
        return kind.products.exact ? of(Variant<kSteps, 2, 1, false, true>{})
                                   : of(Variant<kSteps, 1, 1, false, true>{});
    }
};

template <int kSteps>
struct FusedFp32L2Misaligned {
    template <bool kUnitColumns, bool kAligned>
    static Choice of(std::int64_t width, bool basis_is_bf16) {
        using One = Variant<kSteps, 2, 1, kUnitColumns, kAligned>;
        using Two = Variant<kSteps, 2, 2, kUnitColumns, kAligned>;
        if (!basis_is_bf16) return {kTileRows, shared_bytes<Two>(width, Two::kAligned), &launch_fused<Two>};
        if constexpr (!kUnitColumns && kAligned)
            return {};
        else
            return {kTileRows, shared_bytes<One>(width, One::kAligned), &launch_fused<One>};
    }
    static Choice choose(std::int64_t width, const Kind& kind) {
        if (kind.products.unit_columns)
            return kind.aligned ? of<true, true>(width, kind.basis_is_bf16)
                                : of<true, false>(width, kind.basis_is_bf16);
        return kind.aligned ? of<false, true>(width, kind.basis_is_bf16) : of<false, false>(width, kind.basis_is_bf16);
    }
};

template <int kSteps>
struct StreamedSignsBf16 {
    static Choice choose(std::int64_t, const Kind& kind) {
        const auto of = []<class V>(V) { return Choice{V::kRows, V::kSharedBytes, &launch_streamed<V>}; };
        return kind.products.exact ? of(Streamed<kSteps, 2>{}) : of(Streamed<kSteps, 1>{});
    }
};

// The variant for the smallest compiled number of steps that covers the width.
template <template <int> class Variants, int kSteps, int... kMore>
Choice choose_steps(std::int64_t width, const Kind& kind) {
    if (steps_of(width) <= kSteps) return Variants<kSteps>::choose(width, kind);
    if constexpr (sizeof...(kMore) > 0)
        return choose_steps<Variants, kMore...>(width, kind);
    else
        return {};
}

Choice choose(const Segment& segment, std::int64_t width, const Products& products) {
    const Kind kind = {products, segment.basis_is_bf16, is_aligned(segment, width)};
    if (!kind.signs_bf16())
        return choose_steps<FusedFp32L2Misaligned, DOBB_FUSED_FP32_L2_MISALIGNED_STEPS>(width, kind);
    const Choice choice = choose_steps<FusedSignsBf16, DOBB_FUSED_SIGNS_BF16_STEPS>(width, kind);
    return choice.launch ? choice : choose_steps<StreamedSignsBf16, DOBB_STREAMED_SIGNS_BF16_STEPS>(width, kind);
}

template <bool kAligned>
void launch_wide(const WideWork& work, WideStage stage, simt::Stream stream) {
    constexpr int kThreads = 128, kBlocksPerMultiprocessor = 16;
    const auto kernel = stage == WideStage::kMomentum ? &wide_momentum<kAligned>
                        : stage == WideStage::kSigns  ? &wide_signs<kAligned>
                                                      : &wide_weights<kAligned>;
    const int blocks = std::min(work.slab.blocks * work.slab.rows, kBlocksPerMultiprocessor * simt::multiprocessors());
    simt::launch(kernel, blocks, kThreads, 0, stream, work);
}

}  // namespace

bool fits_one_pass(const Segment& segment, std::int64_t width, const Products& products) {
    const Choice choice = choose(segment, width, products);
    return choice.launch && choice.shared_bytes <= simt::most_shared_memory();
}

std::size_t table_bytes(std::size_t segments) { return segments * sizeof(Entry); }

void run_one_pass(const std::vector<Segment>& segments, const Settings& settings, const Products& products,
                  void* table_memory, unsigned long long* not_finite, Stream stream) {
    auto* next = static_cast<Entry*>(table_memory);
    for (const bool basis_is_bf16 : {true, false})
        for (const bool aligned : {true, false}) {
            std::vector<Segment> chosen;
            std::copy_if(segments.begin(), segments.end(), std::back_inserter(chosen), [&](const Segment& s) {
                return s.basis_is_bf16 == basis_is_bf16 && is_aligned(s, settings.width) == aligned;
            });
            if (chosen.empty()) continue;
            const Choice choice = choose(chosen[0], settings.width, products);
            const Table table = make_table(chosen, settings.width, choice.tile_rows);
            write_table(table, next, static_cast<simt::Stream>(stream));
            choice.launch({next, static_cast<int>(table.entries.size()), table.tiles, settings, not_finite, 0},
                          static_cast<simt::Stream>(stream));
            next += table.entries.size();
        }
}

void run_wide(const Segment& segment, const Settings& settings, const Slab& slab, WideStage stage,
              unsigned long long* not_finite, Stream stream) {
    const WideWork work = {make_table({segment}, settings.width, 1).entries[0], settings, slab, not_finite};
    // Scratch matrices are allocations of their own: only the width can misalign their rows.
    if (is_aligned(segment, settings.width))
        launch_wide<true>(work, stage, static_cast<simt::Stream>(stream));
    else
        launch_wide<false>(work, stage, static_cast<simt::Stream>(stream));
}

}  // namespace dobb::cuda
