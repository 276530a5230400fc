// dobb::update on the CPU: units of work shared out to the threads.
#include "../update.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "update_task.h"

namespace dobb::cpu {
namespace {

// A tile is large enough that the tables of signed sums are made for many rows, and small enough for the cache of a
// core: with G, M and W of the next one, 16 bytes an element.
constexpr std::int64_t kTileElements = 24 * 1024;
constexpr std::int64_t kFewestRows = 32, kMostRows = 256;
constexpr std::size_t kMostScratch = std::size_t{28} << 20;  // of all threads together

std::int64_t tile_rows(const Kernel& kernel, std::int64_t width, int threads) {
    std::int64_t rows = std::clamp(kTileElements / width, std::int64_t{128}, kMostRows);
    while (rows > kFewestRows && kernel.scratch_bytes(width, rows) * threads > kMostScratch) rows /= 2;
    return rows;
}

std::int64_t run(const UpdateArguments& a) {
    const Kernel& use = kernel_in_use();
    const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    const std::int64_t rows = tile_rows(use, a.width, threads);
    const std::vector<Segment> segments = describe(a);
    const std::vector<Unit> units = plan_units(segments, a.width, rows);
    const Settings settings = {a.width, static_cast<float>(a.decay), static_cast<float>(1 - a.momentum), a.nesterov};
    const std::size_t bytes = use.scratch_bytes(a.width, rows);
    std::atomic<std::size_t> next{0};
    std::atomic<std::int64_t> not_finite{0};
    at::parallel_for(0, std::min<std::int64_t>(threads, units.size()), 1, [&](std::int64_t, std::int64_t) {
        const at::DataPtr scratch = c10::GetCPUAllocator()->allocate(bytes);
        std::int64_t found = 0;
        for (std::size_t i = next++; i < units.size(); i = next++)
            found += use.run(segments[units[i].segment], settings, units[i], static_cast<std::byte*>(scratch.get()));
        not_finite += found;
    });
    return not_finite;
}

at::Tensor update(at::TensorList weights, at::TensorList gradients, at::TensorList momenta, at::TensorList bases,
                  at::TensorList copies, at::TensorList column_scales, at::IntArrayRef starts, at::IntArrayRef columns,
                  std::int64_t width, at::ArrayRef<double> scales, double decay, double momentum, bool nesterov,
                  std::string_view precision, std::string_view norm) {
    const UpdateArguments arguments = check_update({weights, gradients, momenta, bases, copies, column_scales, starts,
                                                    columns, width, scales, decay, momentum, nesterov, true},
                                                   precision, norm);
    at::Tensor count = no_bad_coefficients(weights);
    *count.mutable_data_ptr<std::int64_t>() = run(arguments);
    return count;
}

}  // namespace

}  // namespace dobb::cpu

TORCH_LIBRARY_IMPL(dobb, CPU, library) { library.impl("update", dobb::cpu::update); }
