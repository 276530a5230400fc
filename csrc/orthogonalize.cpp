#include "orthogonalize.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/geqrf.h>
#include <ATen/ops/linalg_cholesky_ex.h>
#include <ATen/ops/linalg_householder_product.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <vector>

// MKL's own count of threads, for the calling thread; 0 stands for the count of the process. PyTorch's builds with MKL
// export it, others resolve it to null.
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak));

namespace dobb {
namespace {

// While it lives, MKL runs on one thread wherever this one calls it. Inside a parallel region it takes no further
// threads anyway, but still cuts its work as if it had them, and rounds accordingly.
class OneThread {
  public:
    OneThread() : before_(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0) {}
    ~OneThread() {
        if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before_);
    }
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

  private:
    const int before_;
};

// Rows of one piece of work inside a wide block.
constexpr std::int64_t kTileRows = 128;

// A basis this close to orthonormal is not improved further: the products that would do it round no better.
constexpr float kExact = 2e-6f;

// Where ||Q^T Q - I||_F is below this, one first-order correction leaves at most twice its square, 2e-6.
constexpr double kFirstOrder = 1e-3;

// Squared pivots of the gram of unit columns below this let rounding dominate: the factor is computed with a shift.
constexpr float kSmallPivot = 1e-4f;

// Runs f on one thread, inside a parallel region, where any BLAS and LAPACK take no further threads. Without that they
// would share out the work, and round otherwise than where every thread has a block of its own.
void alone(c10::function_ref<void()> f) {
    at::parallel_for(0, 2, 1, [&](std::int64_t begin, std::int64_t) {
        const OneThread one;
        if (begin == 0) f();
    });
}

// f(first, count) for the tiles of the rows of a wide block, or for all rows at once.
void for_each_tile(std::int64_t rows, c10::function_ref<void(std::int64_t, std::int64_t)> f) {
    if (rows < kWideBlock) return alone([&] { f(0, rows); });
    const std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    at::parallel_for(0, tiles, 1, [&](std::int64_t begin, std::int64_t end) {
        const OneThread one;
        for (std::int64_t i = begin; i < end; ++i) f(i * kTileRows, std::min(kTileRows, rows - i * kTileRows));
    });
}

void multiply(at::Tensor& out, const at::Tensor& left, const at::Tensor& right) {
    for_each_tile(out.size(0), [&](std::int64_t first, std::int64_t count) {
        at::Tensor rows = out.narrow(0, first, count);
        at::mm_out(rows, left.narrow(0, first, count), right);
    });
}

struct Deviation {
    float largest;     // max |Q^T Q - I|
    double frobenius;  // ||Q^T Q - I||_F
};

// `gram` becomes Q^T Q - I.
Deviation deviation(at::Tensor& gram, const at::Tensor& matrix) {
    multiply(gram, matrix.t(), matrix);
    const std::int64_t width = gram.size(0);
    float* entries = gram.mutable_data_ptr<float>();
    float largest = 0;
    double sum = 0;
    for (std::int64_t r = 0; r < width; ++r) {
        float row_largest = 0, row_sum = 0;
        entries[r * width + r] -= 1;
        for (std::int64_t c = 0; c < width; ++c) {
            const float entry = entries[r * width + c];
            row_largest = std::max(row_largest, std::fabs(entry));  // passes over NaN, which the sum keeps
            row_sum += entry * entry;
        }
        largest = std::max(largest, row_largest);
        sum += row_sum;
    }
    return {std::isfinite(sum) ? largest : INFINITY, std::sqrt(sum)};
}

// `gram` holds E = Q^T Q - I and becomes I - U, where U is E / 2 (all = true) or the upper triangle whose sum with its
// transpose is E. Q (I - U) is orthonormal up to second order in E; a triangle keeps every column in the span of those
// before it and itself.
void first_order_correction(at::Tensor& gram, bool all) {
    const std::int64_t width = gram.size(0);
    float* entries = gram.mutable_data_ptr<float>();
    for (std::int64_t r = 0; r < width; ++r) {
        float* row = entries + r * width;
        for (std::int64_t c = 0; c < r; ++c) row[c] = all ? -0.5f * row[c] : 0.0f;
        row[r] = 1 - 0.5f * row[r];
        for (std::int64_t c = r + 1; c < width; ++c) row[c] *= all ? -0.5f : -1.0f;
    }
}

void make_columns_unit(at::Tensor& matrix) {
    const std::int64_t width = matrix.size(1);
    float* entries = matrix.mutable_data_ptr<float>();
    std::vector<float> norm(width, 0.0f);
    for (std::int64_t r = 0; r < width; ++r)
        for (std::int64_t c = 0; c < width; ++c) norm[c] += entries[r * width + c] * entries[r * width + c];
    for (float& value : norm) value = std::sqrt(value);
    for (std::int64_t r = 0; r < width; ++r)
        for (std::int64_t c = 0; c < width; ++c) entries[r * width + c] /= norm[c];
}

void add_to_diagonal(at::Tensor& matrix, float value) {
    float* entries = matrix.mutable_data_ptr<float>();
    for (std::int64_t i = 0; i < matrix.size(0); ++i) entries[i * matrix.size(1) + i] += value;
}

struct Factor {
    at::Tensor upper;  // R with R^T R = gram, row-major
    bool ok;
    float smallest_pivot;  // squared
};

Factor factorise(const at::Tensor& gram) {
    Factor result;
    alone([&] {
        auto [lower, info] = at::linalg_cholesky_ex(gram.t());  // column-major, as LAPACK wants it: not copied
        result.ok = *info.const_data_ptr<int>() == 0;
        result.upper = lower.t();
    });
    float smallest = INFINITY;
    const float* entries = result.upper.const_data_ptr<float>();
    const std::int64_t step = result.upper.stride(0) + result.upper.stride(1);
    for (std::int64_t i = 0; i < gram.size(0); ++i) smallest = std::min(smallest, entries[i * step]);
    result.smallest_pivot = smallest * smallest;
    return result;
}

// The factor of a first pass, shifted where the columns are nearly dependent.
Factor factorise_first(at::Tensor& gram) {
    Factor factor = factorise(gram);
    if (factor.ok && factor.smallest_pivot >= kSmallPivot) return factor;
    add_to_diagonal(gram, kFirstShiftPerColumn * static_cast<float>(gram.size(0)));
    return factorise(gram);
}

// matrix <- matrix R^-1
void divide(at::Tensor& matrix, const at::Tensor& upper) {
    for_each_tile(matrix.size(0), [&](std::int64_t first, std::int64_t count) {
        at::Tensor rows = matrix.narrow(0, first, count);
        rows.copy_(at::linalg_solve_triangular(upper, rows, /*upper=*/true, /*left=*/false));
    });
}

}  // namespace

void iterate_householder(const at::Tensor& scaled, at::Tensor& basis) {
    at::Tensor scratch = at::empty_like(basis), reflected;
    multiply(scratch, basis.t(), scaled.t());  // (A Q)^T, so that A Q is column-major
    alone([&] {
        const auto [reflectors, tau] = at::geqrf(scratch.t());
        reflected = at::linalg_householder_product(reflectors, tau);
    });
    if (deviation(scratch, reflected).largest <= kExact) {
        basis.copy_(reflected);
        return;
    }
    first_order_correction(scratch, /*all=*/true);
    multiply(basis, reflected, scratch);
}

bool iterate_cholesky(const at::Tensor& damped, at::Tensor& basis) {
    at::Tensor matrix = at::empty_like(basis), gram = at::empty_like(basis);
    multiply(matrix, damped, basis);
    make_columns_unit(matrix);
    for (int pass = 0;; ++pass) {
        const Deviation found = deviation(gram, matrix);
        if (found.largest <= kExact) break;
        if (found.frobenius <= kFirstOrder) {
            first_order_correction(gram, /*all=*/false);
            multiply(basis, matrix, gram);
            return true;
        }
        if (pass == kCholeskyPasses) {
            if (!(found.largest <= kMaxError)) return false;
            break;
        }
        add_to_diagonal(gram, 1);
        const Factor factor = pass == 0 ? factorise_first(gram) : factorise(gram);
        if (!factor.ok) return false;
        divide(matrix, factor.upper);
    }
    basis = matrix;
    return true;
}

void for_each_block(std::int64_t blocks, std::int64_t width, c10::function_ref<void(std::int64_t)> block) {
    const auto run = [&](std::int64_t j) {
        // What the calling thread has switched on is no business of the others.
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        const at::AutoDispatchBelowADInplaceOrView no_gradients;
        block(j);
    };
    if (width >= kWideBlock && blocks < at::get_num_threads()) {
        for (std::int64_t j = 0; j < blocks; ++j) run(j);
        return;
    }
    // At least two pieces, so that a single block runs in a parallel region too: see `alone`.
    at::parallel_for(0, std::max<std::int64_t>(blocks, 2), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t j = begin; j < std::min(end, blocks); ++j) run(j);
    });
}

}  // namespace dobb
