// The update of Dobb for one thread: units go through it one after the other, each in three passes.
//   1. M <- mu M + (1 - mu) G; what will be projected is left in tiles, one for each block (traffic.h).
//   2. C = M Q for one tile, and the sign or the scaled value of every coefficient.
//   3. S Q^T, in the place of the tile, and W from it (traffic.h again).
// Pass 1 of the next unit and the writing of the last one's W run along with pass 2. `compute`, `calls_of_compute`,
// `BlockScratch` and `MatrixScope` come from the header that was included before this one: reconstruct_kernel.h for
// vectors, matrix_block.h for matrix units.
#pragma once

namespace dobb::cpu::DOBB_ISA {

constexpr int kJobs = 3;  // one comes in, one is computed on, one goes out

struct Memory {
    BlockScratch block;
    float* tiles[kJobs];
    std::int64_t stride;

    static std::int64_t layout(std::int64_t width, const UnitSize& most, std::byte* memory, Memory* found) {
        std::int64_t used = 0;
        const auto take = [&](std::int64_t bytes) {
            std::byte* place = memory + used;
            used += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
            return place;
        };
        found->stride = tile_stride(width);
        for (float*& tiles : found->tiles)
            tiles = reinterpret_cast<float*>(take(most.rows * most.blocks * found->stride * 4));
        BlockScratch::layout(width, most.rows, take, &found->block);
        return used;
    }
};

std::size_t scratch_bytes(std::int64_t width, const UnitSize& most) {
    Memory memory;
    return static_cast<std::size_t>(Memory::layout(width, most, nullptr, &memory));
}

std::int64_t compute_unit(const Job& job, const Settings& settings, BlockScratch& scratch, Traffic& traffic) {
    const Segment& segment = *job.segment;
    const HeldBlocks held = HeldBlocks::of(segment, settings.width);
    std::int64_t not_finite = 0;
    for (std::int64_t k = 0; k < job.unit.blocks; ++k) {
        const std::int64_t position = held.position(job.unit.first_block + k);
        const float* scales = segment.column_scales ? segment.column_scales + position * settings.width : nullptr;
        const auto apply = [&](const auto* bases) {
            const auto* basis = bases + position * settings.width * settings.width;
            not_finite += compute(job.tile(k), basis, scales, settings, scratch, traffic);
        };
        if (segment.basis_is_bf16)
            apply(static_cast<const std::uint16_t*>(segment.basis));
        else
            apply(static_cast<const float*>(segment.basis));
    }
    return not_finite;
}

std::int64_t run(Work& work, std::byte* bytes) {
    const Settings& settings = work.settings;
    [[maybe_unused]] const MatrixScope scope;
    Memory memory;
    Memory::layout(settings.width, work.most, bytes, &memory);
    int next_tiles = 0;
    const auto job_of = [&](const Unit* unit) {
        if (!unit) return Job{};
        float* tiles = memory.tiles[next_tiles++ % kJobs];
        return Job{&work.segments[unit->segment], *unit, tiles, settings.width, memory.stride};
    };
    std::int64_t not_finite = 0;
    Job last, now = job_of(work.take());
    Traffic(now, last, 0, settings).finish();
    while (now.segment) {
        const Job next = job_of(work.take_ahead());
        Traffic traffic(next, last, now.unit.blocks * calls_of_compute(settings.width, now.unit.rows), settings);
        not_finite += compute_unit(now, settings, memory.block, traffic);
        traffic.finish();
        last = now;
        now = next;
        if (now.segment) continue;
        now = job_of(work.take());
        Traffic(now, last, 0, settings).finish();
        last = Job{};
    }
    return not_finite;
}

}  // namespace dobb::cpu::DOBB_ISA
