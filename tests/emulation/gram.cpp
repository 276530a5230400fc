#include "dobb/cuda/gram.h"

#include "harness.h"

namespace dobb::emulation {
namespace {

const Operation kGram("gram", [](Call& call) {
    const cuda::Activations x = {call.data<void>("activations"),
                                 call.integer("is_bf16") != 0 ? cuda::Type::kBf16 : cuda::Type::kFp16,
                                 call.integer("tokens"), call.integer("row_stride"), call.integer("features")};
    const std::int64_t width = call.integer("width");
    cuda::GramPlan plan = cuda::plan_gram(x, width);
    if (const std::int64_t fewer = call.integer("tiles_at_a_time"); fewer > 0) plan.tiles_at_a_time = fewer;
    const Buffer scratch(plan.scratch_bytes, 0);
    cuda::add_gram(call.data<float>("total"), x, width, plan, scratch.data(), nullptr);
});

}  // namespace
}  // namespace dobb::emulation
