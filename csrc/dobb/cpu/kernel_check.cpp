#include "kernel_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "update_task.h"

namespace dobb::cpu {
namespace {

// More than two tiles of the matrix units and two vectors of 16 lanes in each direction, and a remainder of both.
constexpr std::int64_t kWidth = 35, kRows = 19, kBlocks = 2, kNumel = kRows * kBlocks * kWidth;
constexpr std::int64_t kZeroRow = 3, kBadRow = 5;
constexpr float kRounding = 1e-5f;

using Numbers = std::vector<float>;
using Halves = std::vector<std::uint16_t>;

// Multiples of `unit` between -most and most. Whole numbers this small have exact sums, whatever the order of the terms
// and in two bf16 terms too, so that all variants must agree to the bit.
Numbers whole_numbers(std::int64_t count, std::uint32_t seed, int most, int unit = 1) {
    Numbers numbers;
    for (std::int64_t i = 0; i < count; ++i) {
        seed = seed * 1664525u + 1013904223u;
        numbers.push_back(
            static_cast<float>((static_cast<int>(seed >> 16) % (2 * (most / unit) + 1) - most / unit) * unit));
    }
    return numbers;
}

// Of numbers that bf16 holds exactly.
Halves as_bf16(const Numbers& numbers) {
    Halves halves;
    for (const float x : numbers) {
        std::uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        halves.push_back(static_cast<std::uint16_t>(bits >> 16));
    }
    return halves;
}

void append(const Halves& halves, Numbers& numbers) {
    for (const std::uint16_t half : halves) {
        const std::uint32_t bits = std::uint32_t{half} << 16;
        std::memcpy(&numbers.emplace_back(), &bits, sizeof bits);
    }
}

struct Results {
    Numbers exact, rounded;
};

// One step of a segment with M and G below `momentum` and Q below `basis`. Signs where there are no scales.
void update(const Kernel& kernel, int momentum, bool momentum_is_bf16, int basis, bool basis_is_bf16, bool scaled,
            bool nesterov, Results& results) {
    // Multiples of 4: mu = 1 / 2 leaves them whole, twice with Nesterov momentum.
    Numbers m = whole_numbers(kNumel, 1, momentum, 4), g = whole_numbers(kNumel, 2, momentum, 4);
    for (Numbers* numbers : {&m, &g})
        std::fill_n(numbers->begin() + kZeroRow * kBlocks * kWidth, kBlocks * kWidth, 0.0f);
    g[kBadRow * kBlocks * kWidth] = std::numeric_limits<float>::quiet_NaN();
    const Numbers q = whole_numbers(kBlocks * kWidth * kWidth, 3, basis);
    Numbers weight = whole_numbers(kNumel, 4, 1000), scales(kBlocks * kWidth, 1.0f);
    for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = i % 3 == 0 ? 0.0f : static_cast<float>(i % 3);
    Halves m_bf16 = as_bf16(m), copy(kNumel);
    const Halves g_bf16 = as_bf16(g), q_bf16 = as_bf16(q);
    const std::vector<Segment> segments = {{weight.data(),
                                            momentum_is_bf16 ? static_cast<const void*>(g_bf16.data()) : g.data(),
                                            momentum_is_bf16 ? static_cast<void*>(m_bf16.data()) : m.data(),
                                            basis_is_bf16 ? static_cast<const void*>(q_bf16.data()) : q.data(),
                                            copy.data(), scaled ? scales.data() : nullptr, kNumel, 0, kBlocks * kWidth,
                                            0.25f, momentum_is_bf16, momentum_is_bf16, basis_is_bf16}};
    const UnitSize most = {kRows, 1};
    const std::vector<Unit> units = plan_units(segments, kWidth, most);
    Work work = {segments, units, {kWidth, 0.5f, 0.5f, nesterov}, most, 1};
    std::vector<std::byte> scratch(kernel.scratch_bytes(kWidth, most) + 64);
    std::byte* aligned = scratch.data() + (64 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 64) % 64;
    results.exact.push_back(static_cast<float>(kernel.run(work, aligned)));
    results.exact.insert(results.exact.end(), weight.begin(), weight.end());
    results.exact.insert(results.exact.end(), m.begin(), m.end());
    append(m_bf16, results.exact);
    append(copy, results.exact);
}

// Sums of x x^T, of which the lower triangle counts.
void gram(const Kernel& kernel, Results& results) {
    constexpr std::int64_t kTokens = 9;
    const Numbers x = whole_numbers(kTokens * kWidth, 5, 100);
    const Halves x_bf16 = as_bf16(whole_numbers(kTokens * kWidth, 7, 100));
    const std::int64_t stride = (kWidth + kernel.gram_columns - 1) / kernel.gram_columns * kernel.gram_columns;
    Numbers panels(kTokens * stride), total(kWidth * kWidth, 0.0f);
    kernel.widen_fp32(x.data(), kWidth, kTokens, kWidth, panels.data());
    kernel.add_gram(panels.data(), kTokens, kWidth, 0, stride, total.data());
    kernel.widen_bf16(x_bf16.data(), kWidth, kTokens, kWidth, panels.data());
    kernel.add_gram(panels.data(), kTokens, kWidth, 0, stride, total.data());
    for (std::int64_t r = 0; r < kWidth; ++r)
        results.exact.insert(results.exact.end(), total.begin() + r * kWidth, total.begin() + r * kWidth + r + 1);
}

// One panel A: A / 2, A^T A, A A^T A, and R of its QR decomposition, which is what its reflections leave of it.
void panel(const PanelKernel& kernel, Results& results) {
    constexpr std::int64_t kColumns = 7, kPanelRows = 26;
    const std::int64_t side = kernel.side,
                       rows = (kPanelRows + kernel.row_unit - 1) / kernel.row_unit * kernel.row_unit;
    Numbers a(rows * side, 0.0f), sums(side * side), product(rows * side), factor(2 * side * side);
    const Numbers entries = whole_numbers(kPanelRows * kColumns, 6, 10);
    for (std::int64_t r = 0; r < kPanelRows; ++r)
        std::copy_n(entries.begin() + r * kColumns, kColumns, a.begin() + r * side);
    const auto keep = [&](const Numbers& panel, std::int64_t count, Numbers& where) {
        for (std::int64_t r = 0; r < count; ++r)
            where.insert(where.end(), panel.begin() + r * side, panel.begin() + r * side + kColumns);
    };
    kernel.inner_products(a.data(), a.data(), rows, sums.data());
    keep(sums, kColumns, results.exact);
    kernel.multiply(a.data(), rows, kColumns, sums.data(), product.data());
    keep(product, kPanelRows, results.exact);
    Numbers reflectors = a;
    kernel.reflect(reflectors.data(), rows, kColumns, factor.data());
    kernel.apply(reflectors.data(), factor.data(), rows, a.data());
    keep(a, kPanelRows, results.rounded);
    results.exact.push_back(kernel.divide(product.data(), rows * side, 2.0f));
    keep(product, kPanelRows, results.exact);
    product[0] = std::numeric_limits<float>::infinity();
    results.exact.push_back(kernel.divide(product.data(), rows * side, 2.0f));
}

Results results_of(const Kernel& kernel) {
    Results results;
    update(kernel, 1000, false, 100, true, false, true, results);   // M needs two bf16 terms
    update(kernel, 240, true, 1000, false, false, false, results);  // Q does
    update(kernel, 12, false, 20, true, true, true, results);       // scaled coefficients do
    gram(kernel, results);
    panel(kernel.panels, results);
    return results;
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

bool agree(const Kernel& kernel, const Kernel& plain) {
    const Results found = results_of(kernel), expected = results_of(plain);
    if (!std::equal(found.exact.begin(), found.exact.end(), expected.exact.begin(), expected.exact.end(), same))
        return false;
    float largest = 0;
    for (const float x : expected.rounded) largest = std::max(largest, std::fabs(x));
    return std::equal(found.rounded.begin(), found.rounded.end(), expected.rounded.begin(), expected.rounded.end(),
                      [&](float a, float b) { return std::fabs(a - b) <= kRounding * largest; });
}

}  // namespace dobb::cpu
