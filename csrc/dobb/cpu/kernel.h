// What a compiled variant of the CPU kernels offers. Without PyTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dobb::cpu {

struct UnitSize;
struct Work;

// What the orthogonalisation of blocks is put together from, see householder_kernel.h.
struct PanelKernel {
    std::int64_t side, row_unit;  // columns of a panel; its rows are a multiple of row_unit
    bool (*divide)(float* numbers, std::int64_t count, float divisor);
    void (*multiply)(const float* left, std::int64_t rows, std::int64_t depth, const float* right, float* out);
    void (*inner_products)(const float* left, const float* right, std::int64_t rows, float* sums);
    void (*reflect)(float* panel, std::int64_t rows, std::int64_t columns, float* factor);
    void (*apply)(const float* reflectors, const float* factor, std::int64_t rows, float* target);
};

// One compiled variant of the kernels.
struct Kernel {
    const char* name;
    bool (*supported)();
    // Bytes of scratch memory that a thread needs.
    std::size_t (*scratch_bytes)(std::int64_t width, const UnitSize& most);
    // Updates units until none is left; returns the number of coefficients that are not finite.
    std::int64_t (*run)(Work& work, std::byte* scratch);
    // The sums of x x^T, see gram_kernel.h: activations lie in panels of gram_columns features.
    std::int64_t gram_columns;
    void (*widen_fp32)(const float* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width, float* to);
    void (*widen_bf16)(const std::uint16_t* from, std::int64_t from_stride, std::int64_t tokens, std::int64_t width,
                       float* to);
    void (*add_gram)(const float* x, std::int64_t tokens, std::int64_t width, std::int64_t first_row,
                     std::int64_t last_row, float* total);
    PanelKernel panels;
};

// The compiled variants, the fastest first and the plain one last.
const std::vector<Kernel>& all_kernels();

}  // namespace dobb::cpu
