// dobb::update on the GPU: one-pass kernels where the width and the shared memory allow, products of cuBLAS elsewhere.
#include "dobb/update.h"

#include <ATen/Context.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "update_run.h"

namespace dobb::cuda {
namespace {

// Scratch memory of the wide path: 8 bytes for each element of a slab.
constexpr std::int64_t kSlabElements = std::int64_t{3} << 20;

// The matrices of a slab, as tensors.
struct Matrices {
    at::Tensor terms[2], sums, basis;

    // C = M Q, or S Q^T, in real fp32 or from bf16 terms with fp32 sums.
    void multiply(bool transposed, int terms_in_use) {
        const at::Tensor factor = transposed ? basis.mT() : basis;
        if (basis.scalar_type() == at::kFloat) {
            const at::NoTF32Guard no_tf32;
            at::bmm_out(sums, terms[0], factor);
            return;
        }
        at::bmm_out(sums, terms[0], factor, at::kFloat);
        if (terms_in_use == 2) at::baddbmm_out(sums, sums, terms[1], factor, at::kFloat);
    }
};

void update_slab(const Segment& segment, const Settings& settings, bool exact, Slab slab, const at::Tensor& scratch,
                 unsigned long long* not_finite, Stream stream) {
    const std::int64_t elements = std::int64_t{slab.blocks} * slab.rows * settings.width;
    const std::array<std::int64_t, 3> shape = {slab.blocks, slab.rows, settings.width};
    const auto options = scratch.options();
    auto* memory = static_cast<std::byte*>(scratch.mutable_data_ptr());
    slab.sums = reinterpret_cast<float*>(memory);
    slab.terms[0] = memory + 4 * elements;
    slab.terms[1] = memory + 6 * elements;
    const auto type = segment.basis_is_bf16 ? at::kBFloat16 : at::kFloat;
    const auto view = [&](void* at, at::IntArrayRef sizes, at::ScalarType dtype) {
        return at::from_blob(at, sizes, options.dtype(dtype));
    };
    const std::int64_t basis_bytes = settings.width * settings.width * (segment.basis_is_bf16 ? 2 : 4);
    Matrices matrices = {{view(slab.terms[0], shape, type), {}},
                         view(slab.sums, shape, at::kFloat),
                         view(static_cast<std::byte*>(const_cast<void*>(segment.basis)) + slab.first_held * basis_bytes,
                              {slab.blocks, settings.width, settings.width}, type)};
    if (segment.basis_is_bf16) matrices.terms[1] = view(slab.terms[1], shape, type);
    run_wide(segment, settings, slab, WideStage::kMomentum, not_finite, stream);
    matrices.multiply(false, exact ? 2 : 1);
    run_wide(segment, settings, slab, WideStage::kSigns, not_finite, stream);
    matrices.multiply(true, segment.column_scales ? 2 : 1);
    run_wide(segment, settings, slab, WideStage::kWeights, not_finite, stream);
}

void update_wide(const Segment& segment, const Settings& settings, bool exact, const at::TensorOptions& options,
                 unsigned long long* not_finite, Stream stream) {
    const std::int64_t per_row = segment.columns / settings.width, chunks = segment.numel / settings.width;
    const std::int64_t held = std::min(per_row, chunks), rows = (chunks + per_row - 1) / per_row;
    const std::int64_t most_rows = std::clamp<std::int64_t>(kSlabElements / (held * settings.width), 1, rows);
    const std::int64_t most_blocks = std::clamp<std::int64_t>(kSlabElements / (most_rows * settings.width), 1, held);
    const at::Tensor scratch = at::empty({8 * most_blocks * most_rows * settings.width}, options.dtype(at::kByte));
    for (std::int64_t row = 0; row < rows; row += most_rows)
        for (std::int64_t block = 0; block < held; block += most_blocks) {
            const Slab slab = {static_cast<int>(block),
                               static_cast<int>(std::min(most_blocks, held - block)),
                               row,
                               static_cast<int>(std::min(most_rows, rows - row)),
                               {},
                               nullptr};
            update_slab(segment, settings, exact, slab, scratch, not_finite, stream);
        }
}

at::Tensor update(at::TensorList weights, at::TensorList gradients, at::TensorList momenta, at::TensorList bases,
                  at::TensorList copies, at::TensorList column_scales, at::IntArrayRef starts, at::IntArrayRef columns,
                  std::int64_t width, at::ArrayRef<double> scales, double decay, double momentum, bool nesterov,
                  std::string_view precision, std::string_view norm) {
    const UpdateArguments arguments = check_update({weights, gradients, momenta, bases, copies, column_scales, starts,
                                                    columns, width, scales, decay, momentum, nesterov, true},
                                                   precision, norm);
    const std::vector<Segment> segments = describe(arguments);
    const c10::cuda::CUDAGuard guard(weights[0].device());
    at::Tensor count = no_bad_coefficients(weights);
    if (segments.empty()) return count;
    const Stream stream = c10::cuda::getCurrentCUDAStream().stream();
    const Settings settings = {width, static_cast<float>(decay), static_cast<float>(1 - momentum), nesterov};
    const Products products = {arguments.exact, norm == "l2"};
    auto* not_finite = reinterpret_cast<unsigned long long*>(count.mutable_data_ptr<std::int64_t>());
    std::vector<Segment> one_pass;
    for (const Segment& segment : segments)
        if (fits_one_pass(segment, width, products))
            one_pass.push_back(segment);
        else
            update_wide(segment, settings, arguments.exact, weights[0].options(), not_finite, stream);
    if (!one_pass.empty()) {
        const at::Tensor table =
            at::empty({static_cast<std::int64_t>(table_bytes(one_pass.size()))}, weights[0].options().dtype(at::kByte));
        run_one_pass(one_pass, settings, products, table.mutable_data_ptr(), not_finite, stream);
    }
    return count;
}

}  // namespace
}  // namespace dobb::cuda

TORCH_LIBRARY_IMPL(dobb, CUDA, library) { library.impl("update", dobb::cuda::update); }
