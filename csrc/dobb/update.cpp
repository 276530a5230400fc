#include "update.h"

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

namespace dobb {
namespace {

template <class T>
T* data(const at::Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

bool is_fp32_or_bf16(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16;
}

void check_flat(const char* name, std::size_t i, const at::Tensor& tensor, const at::Tensor& weight) {
    TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.numel() == weight.numel() && tensor.is_contiguous(),
                      "dobb::update: ", name, "[", i, "] has shape ", tensor.sizes(), " and strides ", tensor.strides(),
                      ", expected a contiguous [", weight.numel(), "], like weights[", i, "]");
    TORCH_CHECK_VALUE(tensor.device() == weight.device(), "dobb::update: ", name, "[", i, "] is on ", tensor.device(),
                      ", expected ", weight.device(), ", like weights[", i, "]");
}

std::int64_t held_blocks(std::int64_t numel, std::int64_t columns, std::int64_t width) {
    return std::min(numel, columns) / width;
}

void check_segment(const UpdateArguments& a, std::size_t i) {
    const at::Tensor &weight = a.weights[i], &basis = a.bases[i];
    TORCH_CHECK_VALUE(weight.scalar_type() == at::kFloat, "dobb::update: weights[", i, "] is ", weight.scalar_type(),
                      ", expected fp32 (the master weights)");
    check_flat("weights", i, weight, weight);
    TORCH_CHECK_VALUE(weight.device() == a.weights[0].device(), "dobb::update: weights[", i, "] is on ",
                      weight.device(), ", expected ", a.weights[0].device(), ", like weights[0]");
    TORCH_CHECK_VALUE(a.columns[i] > 0 && a.columns[i] % a.width == 0, "dobb::update: columns[", i, "] is ",
                      a.columns[i], ", expected a multiple of the block width ", a.width);
    TORCH_CHECK_VALUE(a.starts[i] >= 0 && a.starts[i] % a.width == 0 && weight.numel() % a.width == 0,
                      "dobb::update: segment ", i, " is the range [", a.starts[i], ", ", a.starts[i] + weight.numel(),
                      "), expected bounds that are multiples of the block width ", a.width);
    for (const auto& [name, list] : {std::pair{"gradients", a.gradients}, std::pair{"momenta", a.momenta}}) {
        check_flat(name, i, list[i], weight);
        TORCH_CHECK_VALUE(is_fp32_or_bf16(list[i]), "dobb::update: ", name, "[", i, "] is ", list[i].scalar_type(),
                          ", expected fp32 or bf16");
    }
    const std::int64_t held = held_blocks(weight.numel(), a.columns[i], a.width);
    TORCH_CHECK_VALUE(basis.sizes() == at::IntArrayRef({held, a.width, a.width}) && basis.is_contiguous(),
                      "dobb::update: bases[", i, "] has shape ", basis.sizes(), " and strides ", basis.strides(),
                      ", expected a contiguous [", held, ", ", a.width, ", ", a.width, "] for the ", held,
                      " blocks that weights[", i, "] holds");
    TORCH_CHECK_VALUE(is_fp32_or_bf16(basis), "dobb::update: bases[", i, "] is ", basis.scalar_type(),
                      ", expected bf16 or fp32");
    TORCH_CHECK_VALUE(basis.device() == weight.device(), "dobb::update: bases[", i, "] is on ", basis.device(),
                      ", expected ", weight.device(), ", like weights[", i, "]");
    if (!a.column_scales.empty()) {
        const at::Tensor& scales = a.column_scales[i];
        TORCH_CHECK_VALUE(scales.sizes() == at::IntArrayRef({held, a.width}) && scales.is_contiguous(),
                          "dobb::update: column_scales[", i, "] has shape ", scales.sizes(), " and strides ",
                          scales.strides(), ", expected a contiguous [", held, ", ", a.width, "] for the ", held,
                          " blocks that weights[", i, "] holds");
        TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat, "dobb::update: column_scales[", i, "] is ",
                          scales.scalar_type(), ", expected fp32");
        TORCH_CHECK_VALUE(scales.device() == weight.device(), "dobb::update: column_scales[", i, "] is on ",
                          scales.device(), ", expected ", weight.device(), ", like weights[", i, "]");
    }
    if (a.copies.empty() || a.copies[i].numel() == 0) return;
    check_flat("copies", i, a.copies[i], weight);
    TORCH_CHECK_VALUE(a.copies[i].scalar_type() == at::kBFloat16, "dobb::update: copies[", i, "] is ",
                      a.copies[i].scalar_type(), ", expected bf16");
}

// What is written must share no memory with anything else: threads and multiprocessors work on all of it at once.
void check_memory(const UpdateArguments& a) {
    struct Range {
        const char *begin, *end;
        const char* name;
        std::size_t index;
        bool written;
    };
    std::vector<Range> ranges;
    const auto add = [&](const char* name, at::TensorList list, bool written) {
        for (std::size_t i = 0; i < list.size(); ++i)
            if (list[i].numel() > 0) {
                const auto* begin = static_cast<const char*>(list[i].const_data_ptr());
                ranges.push_back({begin, begin + list[i].nbytes(), name, i, written});
            }
    };
    add("weights", a.weights, true);
    add("momenta", a.momenta, true);
    add("copies", a.copies, true);
    add("gradients", a.gradients, false);
    add("bases", a.bases, false);
    add("column_scales", a.column_scales, false);
    std::sort(ranges.begin(), ranges.end(), [](const Range& x, const Range& y) { return x.begin < y.begin; });
    const Range *furthest = nullptr, *furthest_written = nullptr;
    for (const Range& range : ranges) {
        const Range* other = range.written ? furthest : furthest_written;
        TORCH_CHECK_VALUE(!other || range.begin >= other->end, "dobb::update: ", range.name, "[", range.index, "] and ",
                          other->name, "[", other->index,
                          "] share memory, expected memory of its own for all that is "
                          "written: weights, momenta and copies");
        if (!furthest || range.end > furthest->end) furthest = &range;
        if (range.written && (!furthest_written || range.end > furthest_written->end)) furthest_written = &range;
    }
}

at::Tensor update_meta(at::TensorList weights, at::TensorList gradients, at::TensorList momenta, at::TensorList bases,
                       at::TensorList copies, at::TensorList column_scales, at::IntArrayRef starts,
                       at::IntArrayRef columns, std::int64_t width, at::ArrayRef<double> scales, double decay,
                       double momentum, bool nesterov, std::string_view precision, std::string_view norm) {
    const bool known = std::none_of(weights.begin(), weights.end(), [](const at::Tensor& weight) {
        return weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
    });
    if (known)
        check_update({weights, gradients, momenta, bases, copies, column_scales, starts, columns, width, scales, decay,
                      momentum, nesterov, true},
                     precision, norm);
    return no_bad_coefficients(weights);
}

}  // namespace

UpdateArguments check_update(UpdateArguments a, std::string_view precision, std::string_view norm) {
    TORCH_CHECK_VALUE(precision == "exact" || precision == "bf16", "dobb::update: precision is '", precision,
                      "', expected 'exact' or 'bf16'");
    TORCH_CHECK_VALUE(norm == "sign" || norm == "l2", "dobb::update: norm is '", norm, "', expected 'sign' or 'l2'");
    TORCH_CHECK_VALUE(a.width >= 1, "dobb::update: width is ", a.width, ", expected a block width of at least 1");
    const std::size_t count = a.weights.size();
    const auto check_count = [&](const char* name, std::size_t found) {
        TORCH_CHECK_VALUE(found == count, "dobb::update: ", name, " has ", found, " entries, expected ", count,
                          ", one for each of weights");
    };
    check_count("gradients", a.gradients.size());
    check_count("momenta", a.momenta.size());
    check_count("bases", a.bases.size());
    if (!a.copies.empty()) check_count("copies", a.copies.size());
    if (norm == "l2") check_count("column_scales", a.column_scales.size());
    TORCH_CHECK_VALUE(norm == "l2" || a.column_scales.empty(), "dobb::update: column_scales has ",
                      a.column_scales.size(), " entries, expected none for norm 'sign'; use norm 'l2'");
    check_count("starts", a.starts.size());
    check_count("columns", a.columns.size());
    check_count("scales", a.scales.size());
    TORCH_CHECK_VALUE(std::isfinite(a.decay), "dobb::update: decay is ", a.decay,
                      ", expected a finite number; check the learning rate and the weight decay");
    for (std::size_t i = 0; i < count; ++i) {
        TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(a.scales[i])), "dobb::update: scales[", i, "] is ",
                          a.scales[i], ", expected a finite fp32 number; check the learning rate");
        check_segment(a, i);
    }
    a.exact = precision == "exact";
    return a;
}

std::vector<Segment> describe(const UpdateArguments& a) {
    check_memory(a);
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < a.weights.size(); ++i) {
        if (a.weights[i].numel() == 0) continue;
        const bool has_copy = !a.copies.empty() && a.copies[i].numel() > 0;
        const auto is_bf16 = [](const at::Tensor& tensor) { return tensor.scalar_type() == at::kBFloat16; };
        segments.push_back({data<float>(a.weights[i]), data<void>(a.gradients[i]), data<void>(a.momenta[i]),
                            data<void>(a.bases[i]), has_copy ? data<std::uint16_t>(a.copies[i]) : nullptr,
                            a.column_scales.empty() ? nullptr : data<float>(a.column_scales[i]), a.weights[i].numel(),
                            a.starts[i], a.columns[i], static_cast<float>(a.scales[i]), is_bf16(a.gradients[i]),
                            is_bf16(a.momenta[i]), is_bf16(a.bases[i])});
    }
    return segments;
}

at::Tensor no_bad_coefficients(at::TensorList weights) { return at::zeros({1}, weights[0].options().dtype(at::kLong)); }

}  // namespace dobb

TORCH_LIBRARY_IMPL(dobb, Meta, library) { library.impl("update", dobb::update_meta); }
