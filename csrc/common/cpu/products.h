// Products in registers, written over the vector type of vector_*.h.
#pragma once

namespace dobb::cpu::DOBB_ISA {

// sum[r, :] += left[r, k] panel[k, :] over `depth` k, where left[r, k] lies at left[r * row_step + k * step].
template <int kRows, int kVectors>
DOBB_INLINE void add_products(const float* left, std::int64_t row_step, std::int64_t step, const float* panel,
                              std::int64_t depth, Vector (&sum)[kRows][kVectors]) {
    for (std::int64_t k = 0; k < depth; ++k, left += step, panel += kVectors * kLanes) {
        Vector right[kVectors];
        for (int v = 0; v < kVectors; ++v) right[v] = load(panel + v * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Vector factor = broadcast(left[r * row_step]);
            for (int v = 0; v < kVectors; ++v) sum[r][v] = multiply_add(factor, right[v], sum[r][v]);
        }
    }
}

}  // namespace dobb::cpu::DOBB_ISA
