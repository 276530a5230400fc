// The update on the GPU, from the host and without PyTorch: which kernels run, and their launches on a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dobb/cuda/kernels/update_table.h"

namespace dobb::cuda {

using Stream = void*;  // a cudaStream_t

struct Products {
    bool exact;         // M in two bf16 terms
    bool unit_columns;  // scaled columns instead of signs
};

// Whether the one-pass kernels have a variant for this segment that fits into the shared memory of the current device.
bool fits_one_pass(const Segment& segment, std::int64_t width, const Products& products);

// Bytes of GPU memory that describe this many segments to the one-pass kernels.
std::size_t table_bytes(std::size_t segments);

// Updates segments that are not empty and for which fits_one_pass, in one launch for each type of basis and alignment
// that occurs. `table_memory` has table_bytes of them; the number of non-finite coefficients is added to `not_finite`,
// in the memory of the GPU too.
void run_one_pass(const std::vector<Segment>& segments, const Settings& settings, const Products& products,
                  void* table_memory, unsigned long long* not_finite, Stream stream);

// Some rows of some blocks of one segment, for blocks so wide that the products are a library's. The matrices lie in
// scratch memory as [blocks, rows, width].
struct Slab {
    int first_held, blocks;
    std::int64_t first_row;
    int rows;
    // Where Q is bf16: two bf16 terms of what is projected, then of the signs (one term) or scaled columns (two).
    // Where Q is fp32: one fp32 matrix, in terms[0].
    void* terms[2];
    float* sums;  // fp32: C, then S Q^T
};

// What is left for kernels of our own: before C = M Q, between the two products, and after S Q^T.
enum class WideStage { kMomentum, kSigns, kWeights };

void run_wide(const Segment& segment, const Settings& settings, const Slab& slab, WideStage stage,
              unsigned long long* not_finite, Stream stream);

}  // namespace dobb::cuda
