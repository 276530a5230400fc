// dobb::refresh_basis: Q <- orth(A Q) for every block on a CPU. Checks, CPU and Meta.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <tuple>

#include "householder.h"
#include "orthogonalize.h"

namespace dobb {
namespace {

void check(const at::Tensor& moment, const at::Tensor& basis, std::string_view method, std::int64_t iterations) {
    TORCH_CHECK_VALUE(moment.dim() == 3 && moment.sym_size(1) == moment.sym_size(2),
                      "dobb::refresh_basis: moment has shape ", moment.sym_sizes(),
                      ", expected square blocks [blocks, b, b]");
    TORCH_CHECK_VALUE(basis.sym_sizes() == moment.sym_sizes(), "dobb::refresh_basis: basis has shape ",
                      basis.sym_sizes(), ", expected ", moment.sym_sizes(), ", like moment");
    for (const auto& [name, tensor] : {std::pair{"moment", moment}, std::pair{"basis", basis}})
        TORCH_CHECK_VALUE(at::isFloatingType(tensor.scalar_type()), "dobb::refresh_basis: ", name, " is ",
                          tensor.scalar_type(), ", expected a floating type, as fp32 or bf16");
    TORCH_CHECK_VALUE(basis.device() == moment.device(), "dobb::refresh_basis: basis is on ", basis.device(),
                      ", expected ", moment.device(), ", like moment");
    TORCH_CHECK_VALUE(method == "householder" || method == "cholesky", "dobb::refresh_basis: method is '", method,
                      "', expected 'householder' or 'cholesky'");
    TORCH_CHECK_VALUE(iterations >= 1, "dobb::refresh_basis: iterations is ", iterations, ", expected 1 or more");
}

// A / max(diag A) + damping I, where A counts as the identity if that is zero or non-finite, in storage of its own.
at::Tensor damped_block(const at::Tensor& moment) {
    at::Tensor result = at::empty(moment.sizes(), moment.options().dtype(at::kFloat));
    result.copy_(moment);
    const std::int64_t width = moment.size(0);
    float* entries = result.mutable_data_ptr<float>();
    float largest = 0;
    for (std::int64_t i = 0; i < width; ++i) largest = std::max(largest, entries[i * width + i]);
    float zero = 0;  // or NaN
#pragma omp simd reduction(+ : zero)
    for (std::int64_t i = 0; i < width * width; ++i) zero += entries[i] - entries[i];
    const bool usable = largest > 0 && zero == 0;
    if (usable)
        for (std::int64_t i = 0; i < width * width; ++i) entries[i] /= largest;
    else
        std::fill(entries, entries + width * width, 0.0f);
    for (std::int64_t i = 0; i < width; ++i) entries[i * width + i] += kDamping + (usable ? 0.0f : 1.0f);
    return result;
}

// A copy in fp32. It starts at an aligned address wherever the block lies: BLAS may round by alignment.
at::Tensor own_copy(const at::Tensor& basis) {
    at::Tensor result = at::empty(basis.sizes(), basis.options().dtype(at::kFloat));
    result.copy_(basis);
    return result;
}

// False where an iteration failed; the basis is then not to be used.
bool by_cholesky(const at::Tensor& moment, at::Tensor& basis, std::int64_t iterations) {
    const at::Tensor damped = damped_block(moment);
    for (std::int64_t i = 0; i < iterations; ++i)
        if (!iterate_cholesky(damped, basis)) return false;
    return true;
}

std::tuple<at::Tensor, at::Tensor> refresh_basis_cpu(const at::Tensor& moment, const at::Tensor& basis,
                                                     std::string_view method, std::int64_t iterations) {
    check(moment, basis, method, iterations);
    const std::int64_t blocks = moment.size(0), width = moment.size(1);
    at::Tensor result = at::empty(moment.sizes(), moment.options().dtype(at::kFloat));
    at::Tensor fell_back = at::zeros({blocks}, moment.options().dtype(at::kBool));
    if (result.numel() == 0) return {result, fell_back};
    const auto as_kept = [](const at::Tensor& blocks) {
        return (blocks.scalar_type() == at::kBFloat16 ? blocks : blocks.to(at::kFloat)).contiguous();
    };
    const at::Tensor moments = as_kept(moment), bases = as_kept(basis);
    float* out = result.mutable_data_ptr<float>();
    for_each_block(blocks, width, [&](std::int64_t begin, std::int64_t end) {
        std::optional<HouseholderRefresh> householder;
        for (std::int64_t j = begin; j < end; ++j) {
            const at::Tensor block = moments.select(0, j), start = bases.select(0, j);
            if (method == "cholesky") {
                at::Tensor refreshed = own_copy(start);
                if (by_cholesky(block, refreshed, iterations)) {
                    result.select(0, j).copy_(refreshed);
                    continue;
                }
                fell_back.mutable_data_ptr<bool>()[j] = true;
            }
            if (!householder) householder.emplace(width);
            householder->refresh(block, start, iterations, out + j * width * width);
        }
    });
    return {result, fell_back};
}

std::tuple<at::Tensor, at::Tensor> refresh_basis_meta(const at::Tensor& moment, const at::Tensor& basis,
                                                      std::string_view method, std::int64_t iterations) {
    check(moment, basis, method, iterations);
    return {at::empty_symint(moment.sym_sizes(), moment.options().dtype(at::kFloat)),
            at::empty_symint({moment.sym_size(0)}, moment.options().dtype(at::kBool))};
}

}  // namespace
}  // namespace dobb

TORCH_LIBRARY_IMPL(dobb, CPU, library) { library.impl("refresh_basis", dobb::refresh_basis_cpu); }
TORCH_LIBRARY_IMPL(dobb, Meta, library) { library.impl("refresh_basis", dobb::refresh_basis_meta); }
