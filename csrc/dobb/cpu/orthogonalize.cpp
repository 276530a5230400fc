#include "orthogonalize.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_cholesky_ex.h>
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
constexpr float kSmallPivot = 1e-5f;

// What is added on top of the usual shift where that was too small: this many times as much.
constexpr float kLargerShift = 8;

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

double squared_norm(const float* row, std::int64_t width) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t c = 0; c < width; ++c) sum += static_cast<double>(row[c]) * row[c];
    return sum;
}

// The upper triangle of `gram` becomes that of Q^T Q - I, given Q^T; below it is anything. The diagonal comes from
// sums in fp64: all its terms are positive, and those of nearly equal features nearly equal, so that fp32 products
// round each of them the same way and add up to 1e-5, which would go uncorrected.
Deviation deviation(at::Tensor& gram, const at::Tensor& transposed) {
    const std::int64_t width = gram.size(0);
    for_each_tile(width, [&](std::int64_t first, std::int64_t count) {
        for (std::int64_t r = first; r < first + count; r += kTileRows) {
            const std::int64_t rows = std::min(kTileRows, first + count - r), columns = width - r;
            at::Tensor part = gram.narrow(0, r, rows).narrow(1, r, columns);
            at::mm_out(part, transposed.narrow(0, r, rows), transposed.narrow(0, r, columns).t());
        }
    });
    float* entries = gram.mutable_data_ptr<float>();
    const float* vectors = transposed.const_data_ptr<float>();
    float largest = 0;
    double sum = 0;
    for (std::int64_t r = 0; r < width; ++r) {
        float* row = entries + r * width;
        row[r] = static_cast<float>(squared_norm(vectors + r * width, width) - 1);
        float row_largest = 0, row_sum = 0;
#pragma omp simd reduction(max : row_largest) reduction(+ : row_sum)
        for (std::int64_t c = r + 1; c < width; ++c) {
            row_largest = std::max(row_largest, std::fabs(row[c]));  // passes over NaN, which the sum keeps
            row_sum += row[c] * row[c];
        }
        largest = std::max({largest, row_largest, std::fabs(row[r])});
        sum += 2.0 * row_sum + row[r] * row[r];
    }
    return {std::isfinite(sum) ? largest : INFINITY, std::sqrt(sum)};
}

// The upper triangle of `gram` holds E = Q^T Q - I. The whole becomes I - U, where U is the upper triangle whose sum
// with its transpose is E. Q (I - U) is orthonormal up to second order in E, and every column stays in the span of
// those before it and itself.
void first_order_correction(at::Tensor& gram) {
    const std::int64_t width = gram.size(0);
    float* entries = gram.mutable_data_ptr<float>();
    for (std::int64_t r = 0; r < width; ++r) {
        float* row = entries + r * width;
        for (std::int64_t c = 0; c < r; ++c) row[c] = 0;
        row[r] = 1 - 0.5f * row[r];
        for (std::int64_t c = r + 1; c < width; ++c) row[c] = -row[c];
    }
}

void make_rows_unit(at::Tensor& matrix) {
    const std::int64_t width = matrix.size(1);
    float* entries = matrix.mutable_data_ptr<float>();
    for (std::int64_t r = 0; r < matrix.size(0); ++r) {
        float* row = entries + r * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (std::int64_t c = 0; c < width; ++c) sum += row[c] * row[c];
        const float norm = std::sqrt(sum);
        for (std::int64_t c = 0; c < width; ++c) row[c] /= norm;
    }
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

// The factor, shifted where the columns are nearly dependent. LAPACK's builds for other processors sum in other orders;
// where the usual shift is not above what one rounds, a larger one is, and the next passes make up for it.
Factor factorise_or_shift(at::Tensor& gram) {
    Factor factor = factorise(gram);
    if (factor.ok && factor.smallest_pivot >= kSmallPivot) return factor;
    const float usual = kShiftPerColumn * static_cast<float>(gram.size(0));
    for (const float shift : {usual, kLargerShift * usual}) {
        add_to_diagonal(gram, shift);
        factor = factorise(gram);
        if (factor.ok) break;
    }
    return factor;
}

// matrix <- matrix R^-1, given and returned as its transpose
void divide(at::Tensor& transposed, const at::Tensor& upper) {
    at::Tensor result = at::empty_like(transposed);
    for_each_tile(transposed.size(1), [&](std::int64_t first, std::int64_t count) {
        const at::Tensor rows = transposed.narrow(1, first, count).t();
        result.narrow(1, first, count)
            .t()
            .copy_(at::linalg_solve_triangular(upper, rows, /*upper=*/true, /*left=*/false));
    });
    transposed = result;
}

}  // namespace

// A Q lies column by column, which is how LAPACK wants it: buffers hold transposes.
bool iterate_cholesky(const at::Tensor& damped, at::Tensor& basis) {
    at::Tensor transposed = at::empty_like(basis), gram = at::empty_like(basis);
    multiply(transposed, basis.t(), damped.t());
    make_rows_unit(transposed);
    for (int pass = 0;; ++pass) {
        const Deviation found = deviation(gram, transposed);
        if (found.largest <= kExact) break;
        if (found.frobenius <= kFirstOrder) {
            first_order_correction(gram);
            multiply(basis, transposed.t(), gram);
            return true;
        }
        if (pass == kCholeskyPasses) {
            if (!(found.largest <= kMaxError)) return false;
            break;
        }
        add_to_diagonal(gram, 1);
        const Factor factor = factorise_or_shift(gram);
        if (!factor.ok) return false;
        divide(transposed, factor.upper);
    }
    basis.copy_(transposed.t());
    return true;
}

void for_each_block(std::int64_t blocks, std::int64_t width,
                    c10::function_ref<void(std::int64_t, std::int64_t)> range) {
    const auto run = [&](std::int64_t begin, std::int64_t end) {
        // What the calling thread has switched on is no business of the others.
        const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        const at::AutoDispatchBelowADInplaceOrView no_gradients;
        range(begin, end);
    };
    if (width >= kWideBlock && blocks < at::get_num_threads()) return run(0, blocks);
    // At least two pieces, so that a single block runs in a parallel region too: see `alone`.
    at::parallel_for(0, std::max<std::int64_t>(blocks, 2), 1, [&](std::int64_t begin, std::int64_t end) {
        if (begin < blocks) run(begin, std::min(end, blocks));
    });
}

}  // namespace dobb
