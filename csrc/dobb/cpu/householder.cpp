#include "householder.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernel_choice.h"

namespace dobb {
namespace {

// A basis this close to orthonormal is not improved further: the products that would do it round no better.
constexpr float kExact = 2e-6f;

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// f(i) for i = first .. last - 1, on all threads where this one is not among several already.
template <class F>
void for_each(std::int64_t first, std::int64_t last, const F& f) {
    at::parallel_for(first, last, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) f(i);
    });
}

}  // namespace

HouseholderRefresh::HouseholderRefresh(std::int64_t width)
    : kernel_(cpu::kernel_in_use().panels),
      width_(width),
      side_(kernel_.side),
      panels_((width + side_ - 1) / side_),
      rows_(round_up(width, kernel_.row_unit)) {
    const std::int64_t matrix = panels_ * rows_ * side_, factors = panels_ * 2 * side_ * side_;
    memory_ = c10::GetCPUAllocator()->allocate((3 * matrix + factors) * sizeof(float));
    float* place = static_cast<float*>(memory_.get());
    for (Panels& found : matrices_) found = std::exchange(place, place + matrix);
    factors_ = place;
}

void HouseholderRefresh::take(const at::Tensor& matrix, Panels to) const {
    const cpu::Kernel& kernel = cpu::kernel_in_use();
    const void* from = matrix.const_data_ptr();
    for (std::int64_t p = 0; p < panels_; ++p) {
        const std::int64_t first = p * side_, columns = std::min(side_, width_ - first);
        float* panel = to + p * rows_ * side_;
        if (matrix.scalar_type() == at::kBFloat16)
            kernel.widen_bf16(static_cast<const std::uint16_t*>(from) + first, width_, width_, columns, panel);
        else
            kernel.widen_fp32(static_cast<const float*>(from) + first, width_, width_, columns, panel);
        std::fill(panel + width_ * side_, panel + rows_ * side_, 0.0f);
    }
}

void HouseholderRefresh::set_identity(Panels matrix) const {
    std::fill(matrix, matrix + panels_ * rows_ * side_, 0.0f);
    for (std::int64_t i = 0; i < width_; ++i) *at(matrix, i, i) = 1;
}

void HouseholderRefresh::scale(const at::Tensor& moment, Panels scaled) const {
    take(moment, scaled);
    float largest = 0;
    for (std::int64_t i = 0; i < width_; ++i) largest = std::max(largest, *at(scaled, i, i));
    if (!(largest > 0) || !kernel_.divide(scaled, panels_ * rows_ * side_, largest)) set_identity(scaled);
}

void HouseholderRefresh::multiply(const float* left, const float* right, Panels out) const {
    for_each(0, panels_, [&](std::int64_t p) {
        const std::int64_t panel = p * rows_ * side_;
        kernel_.multiply(left, rows_, width_, right + panel, out + panel);
    });
}

// basis <- the product of the reflections that make `product` triangular, which their vectors replace.
void HouseholderRefresh::orthonormalise(Panels product, Panels basis) const {
    const std::int64_t square = side_ * side_;
    for (std::int64_t p = 0; p < panels_; ++p) {
        const std::int64_t first = p * side_, rows = rows_ - first;
        float *reflectors = at(product, first, first), *factor = factors_ + p * 2 * square;
        kernel_.reflect(reflectors, rows, std::min(side_, width_ - first), factor);
        for_each(p + 1, panels_, [&](std::int64_t other) {
            kernel_.apply(reflectors, factor, rows, at(product, first, other * side_));
        });
    }
    set_identity(basis);
    for_each(0, panels_, [&](std::int64_t column) {
        for (std::int64_t p = column; p >= 0; --p) {  // those behind leave these columns of the identity alone
            const std::int64_t first = p * side_;
            kernel_.apply(at(product, first, first), factors_ + (2 * p + 1) * square, rows_ - first,
                          at(basis, first, column * side_));
        }
    });
}

// The upper triangle of `deviation` becomes that of Q^T Q - I. Returns the largest magnitude.
float HouseholderRefresh::deviate(const float* basis, Panels deviation) const {
    std::vector<float> largest(static_cast<std::size_t>(panels_), 0.0f);
    for_each(0, panels_, [&](std::int64_t column) {
        float found = 0;
        for (std::int64_t p = 0; p <= column; ++p) {
            float* part = at(deviation, p * side_, column * side_);
            const std::int64_t rows = std::min(side_, rows_ - p * side_), panel = rows_ * side_;
            std::vector<float> sums(static_cast<std::size_t>(side_ * side_));
            kernel_.inner_products(basis + p * panel, basis + column * panel, rows_, sums.data());
            if (p == column)
                for (std::int64_t i = 0; i < std::min(side_, width_ - p * side_); ++i) sums[i * side_ + i] -= 1;
            float rest = 0;  // or NaN
            for (std::int64_t i = 0; i < rows * side_; ++i) {
                found = std::max(found, std::fabs(sums[i]));
                rest += sums[i] - sums[i];
            }
            if (rest != 0) found = INFINITY;
            std::memcpy(part, sums.data(), static_cast<std::size_t>(rows * side_) * sizeof(float));
        }
        largest[static_cast<std::size_t>(column)] = found;
    });
    return *std::max_element(largest.begin(), largest.end());
}

// From the upper triangle of E = Q^T Q - I, I - E / 2: with it, Q is orthonormal up to second order in E.
void HouseholderRefresh::set_correction(Panels deviation) const {
    for (std::int64_t c = 0; c < width_; ++c)
        for (std::int64_t r = 0; r <= c; ++r) {
            const float half = -0.5f * *at(deviation, r, c);
            *at(deviation, r, c) = *at(deviation, c, r) = r == c ? 1 + half : half;
        }
}

void HouseholderRefresh::give(const float* matrix, float* out) const {
    for (std::int64_t p = 0; p < panels_; ++p) {
        const std::size_t bytes = static_cast<std::size_t>(std::min(side_, width_ - p * side_)) * sizeof(float);
        for (std::int64_t r = 0; r < width_; ++r)
            std::memcpy(out + r * width_ + p * side_, matrix + (p * rows_ + r) * side_, bytes);
    }
}

void HouseholderRefresh::refresh(const at::Tensor& moment, const at::Tensor& basis, std::int64_t iterations,
                                 float* out) {
    auto& [first, second, third] = matrices_;
    take(basis, second);
    for (std::int64_t i = 0; i < iterations; ++i) {
        scale(moment, first);
        multiply(first, second, third);
        orthonormalise(third, first);
        if (deviate(first, second) <= kExact) {
            std::swap(first, second);
            continue;
        }
        set_correction(second);
        multiply(first, second, third);
        std::swap(second, third);
    }
    give(second, out);
}

}  // namespace dobb
