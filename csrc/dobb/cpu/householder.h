// Orthonormal bases by Householder reflections in blocks, on a CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "kernel.h"

namespace dobb {

// Refreshes blocks of one width, one after the other; wide ones share their work out to the threads. The bits of a
// result depend on its block alone, and on the variant of the kernels.
class HouseholderRefresh {
  public:
    explicit HouseholderRefresh(std::int64_t width);

    // out <- orth(A Q), `iterations` times, for contiguous blocks [b, b] in fp32 or bf16 and out in fp32. A counts as
    // the identity where its largest diagonal entry is zero, or any entry is not finite.
    void refresh(const at::Tensor& moment, const at::Tensor& basis, std::int64_t iterations, float* out);

  private:
    using Panels = float*;  // [panels, rows, side]: a matrix in panels, with zeros beyond the width

    void take(const at::Tensor& matrix, Panels to) const;
    void scale(const at::Tensor& moment, Panels scaled) const;
    void set_identity(Panels matrix) const;
    void multiply(const float* left, const float* right, Panels out) const;
    void orthonormalise(Panels product, Panels basis) const;
    float deviate(const float* basis, Panels deviation) const;
    void set_correction(Panels deviation) const;
    void give(const float* matrix, float* out) const;

    // Element `column` of row `row`.
    float* at(Panels matrix, std::int64_t row, std::int64_t column) const {
        return matrix + (column / side_ * rows_ + row) * side_ + column % side_;
    }

    const cpu::PanelKernel& kernel_;
    const std::int64_t width_, side_, panels_, rows_;
    at::DataPtr memory_;
    Panels matrices_[3];
    float* factors_;  // [panels, 2, side, side]
};

}  // namespace dobb
