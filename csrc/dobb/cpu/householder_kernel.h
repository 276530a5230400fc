// Householder reflections in blocks, written over the vector type of vector_*.h.
//
// A matrix lies in panels of kGramColumns columns, each [rows, kGramColumns]. The reflections of a panel's columns make
// one block reflector, H_1 H_2 ... = I - V T V^T, whose V takes the panel's place: R is never needed. Rows are a
// multiple of kGramRows; those beyond the width are zero, as are columns, and reflected by nothing.
#pragma once

namespace dobb::cpu::DOBB_ISA {

constexpr int kSide = kGramColumns;
constexpr std::int64_t kRowsAtATime = 128;  // of two panels in L1, and in one sum: more would round worse
constexpr float kTinyColumn = 1e-24f;       // squared norms below this are not to be trusted near underflow

// Divides `count` numbers by `divisor`. False where one of them is not finite.
bool divide_all(float* numbers, std::int64_t count, float divisor) {
    Vector odd = zero();  // or NaN
    const Vector by = broadcast(divisor);
    for (std::int64_t i = 0; i < count; i += kLanes) {
        const Vector x = load(numbers + i);
        odd = add(odd, subtract(x, x));
        store(numbers + i, divide(x, by));
    }
    float lanes[kLanes];
    store(lanes, odd);
    float sum = 0;
    for (float lane : lanes) sum += lane;
    return sum == 0;
}

// out = left right, for one panel of right and out; left [panels, rows, kSide] and right have `depth` columns and rows.
void multiply_panels(const float* left, std::int64_t rows, std::int64_t depth, const float* right, float* out) {
    for (std::int64_t r = 0; r < rows; r += kGramRows) {
        Vector sum[kGramRows][kGramVectors];
        for (auto& row : sum)
            for (Vector& x : row) x = zero();
        for (std::int64_t k = 0; k < depth; k += kSide)
            add_products(left + k * rows + r * kSide, kSide, 1, right + k * kSide,
                         depth - k < kSide ? depth - k : kSide, sum);
        for (int i = 0; i < kGramRows; ++i)
            for (int v = 0; v < kGramVectors; ++v) store(out + (r + i) * kSide + v * kLanes, sum[i][v]);
    }
}

// sums [kSide, kSide] = left^T right, of two panels.
void inner_products(const float* left, const float* right, std::int64_t rows, float* sums) {
    for (std::int64_t first = 0; first < rows; first += kRowsAtATime) {
        const std::int64_t count = rows - first < kRowsAtATime ? rows - first : kRowsAtATime;
        for (int i = 0; i < kSide; i += kGramRows) {
            Vector sum[kGramRows][kGramVectors];
            for (auto& row : sum)
                for (Vector& x : row) x = zero();
            add_products(left + first * kSide + i, 1, kSide, right + first * kSide, count, sum);
            for (int r = 0; r < kGramRows; ++r)
                for (int v = 0; v < kGramVectors; ++v) {
                    float* to = sums + (i + r) * kSide + v * kLanes;
                    store(to, first == 0 ? sum[r][v] : add(load(to), sum[r][v]));
                }
        }
    }
}

// dots[c] = the product of columns `column` and c, over rows from `first` on.
DOBB_INLINE void column_products(const float* panel, std::int64_t first, std::int64_t rows, int column, float* dots) {
    Vector sum[kGramRows][kGramVectors];
    for (auto& row : sum)
        for (Vector& x : row) x = zero();
    for (std::int64_t r = first; r < rows; r += kGramRows)
        for (int i = 0; i < kGramRows; ++i) {
            const float* row = panel + (r + i) * kSide;
            const Vector x = broadcast(row[column]);
            for (int v = 0; v < kGramVectors; ++v) sum[i][v] = multiply_add(x, load(row + v * kLanes), sum[i][v]);
        }
    for (int v = 0; v < kGramVectors; ++v) {
        for (int step = kGramRows / 2; step > 0; step /= 2)
            for (int i = 0; i < step; ++i) sum[i][v] = add(sum[i][v], sum[i + step][v]);
        store(dots + v * kLanes, sum[0][v]);
    }
}

// Column `column` of the panel becomes the vector of its reflection, which is made on the columns behind it.
DOBB_INLINE void reflect_column(float* panel, std::int64_t rows, int column) {
    const std::int64_t first = column / kGramRows * kGramRows;
    float* diagonal = panel + column * kSide + column;
    float top = *diagonal, dots[kSide];
    for (int r = 0; r <= column; ++r) panel[r * kSide + column] = 0;
    column_products(panel, first, rows, column, dots);
    if (dots[column] + top * top < kTinyColumn) {  // the vector does not depend on the scale: choose a better one
        float largest = std::fabs(top);
        for (std::int64_t r = first; r < rows; ++r) largest = std::fmax(largest, std::fabs(panel[r * kSide + column]));
        if (largest == 0) return;
        top /= largest;
        for (std::int64_t r = first; r < rows; ++r) panel[r * kSide + column] /= largest;
        column_products(panel, first, rows, column, dots);
    }
    if (dots[column] == 0) return;  // nothing to reflect; what is not a number goes on
    const float norm = -std::copysign(std::sqrt(dots[column] + top * top), top);
    const float scale = 1 / (top - norm), tau = (norm - top) / norm;
    for (int c = 0; c <= column; ++c) dots[c] = 0;
    for (int c = column + 1; c < kSide; ++c) dots[c] = tau * (panel[column * kSide + c] + scale * dots[c]);
    Vector weight[kGramVectors];
    for (int v = 0; v < kGramVectors; ++v) weight[v] = load(dots + v * kLanes);
    for (std::int64_t r = first; r < rows; ++r) {
        float* row = panel + r * kSide;
        const float entry = row[column] * scale;
        const Vector minus = broadcast(-entry);
        for (int v = 0; v < kGramVectors; ++v)
            store(row + v * kLanes, multiply_add(minus, weight[v], load(row + v * kLanes)));
        row[column] = entry;
    }
    *diagonal = 1;
}

// The panel, from the row of its first column's diagonal on, becomes V of its reflections; `factor` [2, kSide, kSide]
// is T^T, with which the adjoint of their product is applied, and T.
void reflect_panel(float* panel, std::int64_t rows, std::int64_t columns, float* factor) {
    for (int c = 0; c < columns; ++c) reflect_column(panel, rows, c);
    for (std::int64_t r = 0; columns < kSide && r < rows; ++r)
        for (std::int64_t c = columns; c < kSide; ++c) panel[r * kSide + c] = 0;
    float gram[kSide * kSide];
    inner_products(panel, panel, rows, gram);
    float *adjoint = factor, *forward = factor + kSide * kSide;
    std::memset(factor, 0, 2 * kSide * kSide * sizeof(float));
    // From V itself, and more than fp32: the error of 2 / |v|^2 is how far a reflection is from orthogonal.
    double squares[kSide] = {};
    for (std::int64_t r = 0; r < rows; ++r)
        for (int c = 0; c < kSide; ++c) squares[c] += static_cast<double>(panel[r * kSide + c]) * panel[r * kSide + c];
    for (int j = 0; j < kSide; ++j) {
        if (squares[j] == 0) continue;
        const float tau = static_cast<float>(2 / squares[j]);
        Vector sum[kGramVectors];
        for (Vector& x : sum) x = zero();
        for (int k = 0; k < j; ++k)
            for (int v = 0; v < kGramVectors; ++v)
                sum[v] =
                    multiply_add(broadcast(-tau * gram[j * kSide + k]), load(adjoint + k * kSide + v * kLanes), sum[v]);
        for (int v = 0; v < kGramVectors; ++v) store(adjoint + j * kSide + v * kLanes, sum[v]);
        adjoint[j * kSide + j] = tau;
        for (int k = 0; k <= j; ++k) forward[k * kSide + j] = adjoint[j * kSide + k];
    }
}

// target <- (I - V factor V^T) target, for one panel of it.
void apply_reflections(const float* reflectors, const float* factor, std::int64_t rows, float* target) {
    float inner[kSide * kSide], weights[kSide * kSide];
    inner_products(reflectors, target, rows, inner);
    multiply_panels(factor, kSide, kSide, inner, weights);
    for (int i = 0; i < kSide * kSide; i += kLanes) store(weights + i, subtract(zero(), load(weights + i)));
    for (std::int64_t r = 0; r < rows; r += kGramRows) {
        Vector sum[kGramRows][kGramVectors];
        for (int i = 0; i < kGramRows; ++i)
            for (int v = 0; v < kGramVectors; ++v) sum[i][v] = load(target + (r + i) * kSide + v * kLanes);
        add_products(reflectors + r * kSide, kSide, 1, weights, kSide, sum);
        for (int i = 0; i < kGramRows; ++i)
            for (int v = 0; v < kGramVectors; ++v) store(target + (r + i) * kSide + v * kLanes, sum[i][v]);
    }
}

constexpr PanelKernel kPanelKernel = {kSide,          kGramRows,     divide_all,       multiply_panels,
                                      inner_products, reflect_panel, apply_reflections};

}  // namespace dobb::cpu::DOBB_ISA
