// dobb::update on the CPU: units of work shared out to the threads.
#include "dobb/update.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "kernel_choice.h"
#include "update_task.h"

namespace dobb::cpu {
namespace {

// Tables of signed sums are made once for all rows of a tile, so it should have many. Three units' tiles of a thread
// share the cache of its core, and rows of a unit should be long runs of memory.
constexpr std::int64_t kUnitElements = 24 * 1024;
constexpr std::int64_t kFewestRows = 32, kMostRows = 128;
constexpr std::size_t kMostScratch = std::size_t{28} << 20;  // of all threads together

UnitSize unit_size(const Kernel& kernel, std::int64_t width, int threads) {
    UnitSize most = {kMostRows, std::max<std::int64_t>(1, kUnitElements / (kMostRows * tile_stride(width)))};
    while (most.rows > kFewestRows && kernel.scratch_bytes(width, most) * threads > kMostScratch) most.rows /= 2;
    return most;
}

std::int64_t run(const UpdateArguments& a) {
    const Kernel& use = kernel_in_use();
    const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    const UnitSize most = unit_size(use, a.width, threads);
    const std::vector<Segment> segments = describe(a);
    const std::vector<Unit> units = plan_units(segments, a.width, most);
    const Settings settings = {a.width, static_cast<float>(a.decay), static_cast<float>(1 - a.momentum), a.nesterov,
                               a.exact};
    const std::size_t bytes = use.scratch_bytes(a.width, most);
    Work work = {segments, units, settings, most, static_cast<std::size_t>(threads)};
    std::atomic<std::int64_t> not_finite{0};
    at::parallel_for(0, std::min<std::int64_t>(threads, units.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        const at::DataPtr scratch = c10::GetCPUAllocator()->allocate(bytes);
        for (std::int64_t i = begin; i < end; ++i) not_finite += use.run(work, static_cast<std::byte*>(scratch.get()));
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
