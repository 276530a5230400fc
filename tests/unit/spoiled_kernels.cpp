// Stands in for csrc/dobb/cpu/kernel_list.cpp in a build of a test's own, where a variant of the CPU kernels is wrong.
// DOBB_TEST_SPOILED names variants and what is wrong with them, as in "amx:weight,avx2:gram".
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/cpu/target.h"
#include "dobb/cpu/kernel.h"
#include "dobb/cpu/update_task.h"

namespace dobb::cpu {

extern const Kernel kPlainKernel;
#ifdef DOBB_X86
extern const Kernel kAmxKernel, kAvx512Bf16Kernel, kAvx512Kernel, kAvx2Kernel;
#endif

namespace {

std::int64_t miscounts(Work& work, std::byte* scratch) { return kPlainKernel.run(work, scratch) + 1; }

std::int64_t moves_a_weight(Work& work, std::byte* scratch) {
    const std::int64_t count = kPlainKernel.run(work, scratch);
    work.segments[0].weight[1] += 0.25f;
    return count;
}

Kernel spoil(Kernel kernel, const std::string& what) {
    if (what == "count" || what == "weight") {
        kernel.run = what == "count" ? miscounts : moves_a_weight;
        kernel.scratch_bytes = kPlainKernel.scratch_bytes;
    }
    if (what == "gram")
        kernel.add_gram = [](const float*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, float*) {};
    if (what == "widen_bf16")
        kernel.widen_bf16 = [](const std::uint16_t*, std::int64_t, std::int64_t, std::int64_t, float*) {};
    if (what == "divide") kernel.panels.divide = [](float*, std::int64_t, float) { return true; };
    if (what == "reflect")
        kernel.panels.reflect = [](float*, std::int64_t, std::int64_t, float* factor) { factor[0] = 0; };
    return kernel;
}

}  // namespace

const std::vector<Kernel>& all_kernels() {
    static const std::vector<Kernel> kernels = [] {
        const char* spoiled = std::getenv("DOBB_TEST_SPOILED");
        std::vector<Kernel> made;
        const Kernel compiled[] = {
#ifdef DOBB_X86
            kAmxKernel,   kAvx512Bf16Kernel, kAvx512Kernel, kAvx2Kernel,
#endif
            kPlainKernel,
        };
        for (const Kernel& kernel : compiled) {
            const char* found = spoiled ? std::strstr(spoiled, (std::string(kernel.name) + ":").c_str()) : nullptr;
            std::string what = found ? std::strchr(found, ':') + 1 : "";
            made.push_back(spoil(kernel, what.substr(0, what.find(','))));
        }
        return made;
    }();
    return kernels;
}

}  // namespace dobb::cpu
