// dobb::update: one step of Dobb for all segments of one block width. Checks, shared by all devices.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "segment.h"

namespace dobb {

struct UpdateArguments {
    at::TensorList weights;        // each [numel] fp32, changed in place
    at::TensorList gradients;      // each [numel] fp32 or bf16
    at::TensorList momenta;        // each [numel] fp32 or bf16, changed in place
    at::TensorList bases;          // each [held blocks, width, width] bf16 or fp32
    at::TensorList copies;         // none, or one for each weight: [numel] bf16, or empty for none; overwritten
    at::TensorList column_scales;  // norm l2: one for each weight, [held blocks, width] fp32; norm sign: none
    at::IntArrayRef starts;        // position of each segment in its weight, a multiple of the width
    at::IntArrayRef columns;       // of each weight on this rank
    std::int64_t width;            // columns in one block
    at::ArrayRef<double> scales;   // learning rate times the scale of the direction
    double decay;                  // 1 - learning rate times weight decay
    double momentum;               // mu
    bool nesterov;
    bool exact;  // from precision: "exact" keeps the signs of fp32 products, "bf16" may round M and Q
};

// Parses the op's two strings and checks every tensor. Throws c10::Error (ValueError in Python) with a message that
// names the tensor, what it is and what was expected.
UpdateArguments check_update(UpdateArguments arguments, std::string_view precision, std::string_view norm);

// The segments that are not empty, for the kernels.
std::vector<Segment> describe(const UpdateArguments& arguments);

// The tensor that the op returns where there is nothing to do: no coefficient that is not finite.
at::Tensor no_bad_coefficients(at::TensorList weights);

}  // namespace dobb
