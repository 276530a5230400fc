// Kernels with one defect each, and sound ones beside them, to show what the emulation reports.
#include <dobb_simt.h>

#include "harness.h"

namespace dobb::emulation {
namespace {

using simt::launch;

constexpr int kThreads = 64, kFloats = 64;

// ---- Divergence ----

DOBB_KERNEL(64, 1) divergent_barrier() {
    if (simt::thread_index() < 48)
        simt::barrier();
    else
        simt::barrier();
}

DOBB_KERNEL(64, 1) early_return() {
    if (simt::thread_index() == 5) return;
    simt::barrier();
}

DOBB_KERNEL(64, 1) divergent_shuffle(float* to) {
    const int thread = simt::thread_index();
    float x = 1.0f;
    if (thread % 32 < 16) x = simt::shuffle_xor(x, 1);
    to[thread] = x;
}

DOBB_KERNEL(64, 1) warp_operations_at_two_places(float* to) {
    const int thread = simt::thread_index();
    float x = 1.0f;
    if (thread % 2 == 0)
        x += simt::shuffle_xor(x, 1);
    else
        x += simt::shuffle_xor(x, 1);
    to[thread] = x;
}

// A barrier and a shuffle that whole warps skip or repeat as they please are sound.
DOBB_KERNEL(64, 1) warps_apart(float* to) {
    const int thread = simt::thread_index();
    float x = static_cast<float>(thread);
    for (int i = 0; i < 1 + thread / 32; ++i) x += simt::shuffle_xor(x, 1 << i);
    simt::barrier();
    to[thread] = x;
}

// ---- Memory ----

DOBB_KERNEL(64, 1) reads_global(float* to, const float* from, int offset) {
    to[simt::thread_index()] = from[simt::thread_index() + offset];
}

DOBB_KERNEL(64, 1) reads_shared(float* to, int offset) {
    auto* shared = reinterpret_cast<float*>(simt::shared_memory());
    shared[simt::thread_index()] = 1.0f;
    simt::barrier();
    to[simt::thread_index()] = shared[simt::thread_index() + offset];
}

DOBB_KERNEL(64, 1) copies_quads(float* to, const float* from) {
    const int thread = simt::thread_index();
    if (thread >= kFloats / 4) return;
    simt::store_once(reinterpret_cast<simt::Quad*>(to) + thread,
                     simt::load_once(reinterpret_cast<const simt::Quad*>(from) + thread));
}

// Each thread copies four floats, and then reads four others: with or without its wait, with or without the barrier.
DOBB_KERNEL(64, 1) copies_behind_its_back(float* to, const float* from, int offset, bool waits, bool meets) {
    const int thread = simt::thread_index(), other = simt::thread_count() - 1 - thread;
    auto* shared = reinterpret_cast<float*>(simt::shared_memory()) + offset;
    simt::copy_async(shared + 4 * thread, from + 4 * thread);
    simt::copy_async_commit();
    simt::copy_async_commit();  // an empty group
    if (waits)
        simt::copy_async_wait<1>();
    else
        simt::copy_async_wait<2>();
    if (meets) simt::barrier();
    for (int i = 0; i < 4; ++i) to[4 * thread + i] = shared[4 * other + i];
}

DOBB_KERNEL(64, 1) reverses(float* x, bool meets) {
    const int thread = simt::thread_index(), other = simt::thread_count() - 1 - thread;
    auto* shared = reinterpret_cast<float*>(simt::shared_memory());
    shared[thread] = x[thread];
    if (meets) simt::barrier();
    x[thread] = shared[other];
}

// All write zeros where zeros are: only a search for unordered accesses can tell.
DOBB_KERNEL(64, 1) races(float* x, int defect, bool repaired) {
    const int thread = simt::thread_index(), warp = thread / 32;
    auto* shared = reinterpret_cast<float*>(simt::shared_memory());
    const auto meet = [&] {
        if (repaired) simt::barrier();
    };
    const auto use = [](volatile float& found) { return found; };
    switch (defect) {
        case 0:
            if (thread == 0) shared[0] = 0.0f;
            meet();
            use(shared[0]);
            break;
        case 1:
            use(shared[0]);
            meet();
            if (thread == 63) shared[0] = 0.0f;
            break;
        case 2:
            if (thread == 0) shared[0] = 0.0f;
            meet();
            if (thread == 40) shared[0] = 0.0f;
            break;
        case 3:
            if (thread == 0) shared[0] = 0.0f;
            simt::warp_barrier();
            if (warp == 1 && !repaired) use(shared[0]);
            if (warp == 0) use(shared[0]);
            break;
        case 4:
            shared[thread] = 0.0f;
            if (repaired) simt::warp_barrier();
            use(shared[thread ^ 1]);
            break;
        case 5:
            if (thread == 0) {
                simt::copy_async(shared, x);
                simt::copy_async_commit();
                if (repaired) simt::copy_async_wait<0>();
            }
            simt::barrier();
            use(shared[0]);
            break;
        case 6:
            use(shared[0]);
            meet();
            if (thread == 63) simt::copy_async(shared, x);
            break;
        case 7:
            if (thread == 0) x[repaired ? simt::block_index() : 0] = 0.0f;
            break;
    }
}

// Whichever block runs last leaves its number.
DOBB_KERNEL(32, 1) blocks_write_one_place(float* to) { to[0] = static_cast<float>(simt::block_index()); }

DOBB_KERNEL(32, 1) runs_for_ever(volatile float* x) {
    while (x[0] == 0.0f) x[1] = x[0];
}

DOBB_KERNEL(32, 1) uses_much_stack(float* to) {
    volatile float much[1 << 17];
    for (int i = 0; i < 1 << 17; ++i) much[i] = 1.0f;
    to[0] = much[simt::thread_index()];
}

const Operation kDivergentBarrier("divergent_barrier",
                                  [](Call&) { launch(divergent_barrier, 1, kThreads, 0, nullptr); });
const Operation kEarlyReturn("early_return", [](Call&) { launch(early_return, 1, kThreads, 0, nullptr); });
const Operation kDivergentShuffle("divergent_shuffle", [](Call& call) {
    launch(divergent_shuffle, 1, kThreads, 0, nullptr, call.data<float>("to"));
});
const Operation kTwoPlaces("warp_operations_at_two_places", [](Call& call) {
    launch(warp_operations_at_two_places, 1, kThreads, 0, nullptr, call.data<float>("to"));
});
const Operation kWarpsApart("warps_apart",
                            [](Call& call) { launch(warps_apart, 1, kThreads, 0, nullptr, call.data<float>("to")); });
const Operation kReadsGlobal("reads_global", [](Call& call) {
    launch(reads_global, 1, kThreads, 0, nullptr, call.data<float>("to"),
           static_cast<const float*>(call.data<float>("from")), static_cast<int>(call.integer("offset")));
});
const Operation kReadsShared("reads_shared", [](Call& call) {
    launch(reads_shared, 1, kThreads, kFloats * sizeof(float), nullptr, call.data<float>("to"),
           static_cast<int>(call.integer("offset")));
});
const Operation kCopiesQuads("copies_quads", [](Call& call) {
    launch(copies_quads, 1, kThreads, 0, nullptr, call.data<float>("to"),
           static_cast<const float*>(call.data<float>("from")));
});
const Operation kCopiesBehind("copies_behind_its_back", [](Call& call) {
    launch(copies_behind_its_back, 1, kThreads, 4 * kThreads * sizeof(float), nullptr, call.data<float>("to"),
           static_cast<const float*>(call.data<float>("from")), static_cast<int>(call.integer("offset")),
           call.integer("waits") != 0, call.integer("meets") != 0);
});
const Operation kReverses("reverses", [](Call& call) {
    launch(reverses, 1, kThreads, kFloats * sizeof(float), nullptr, call.data<float>("x"), call.integer("meets") != 0);
});
const Operation kRaces("races", [](Call& call) {
    launch(races, 2, kThreads, kFloats * sizeof(float), nullptr, call.data<float>("x"),
           static_cast<int>(call.integer("defect")), call.integer("repaired") != 0);
});
const Operation kOnePlace("blocks_write_one_place", [](Call& call) {
    launch(blocks_write_one_place, 4, 32, 0, nullptr, call.data<float>("to"));
});
const Operation kMuchStack("uses_much_stack",
                           [](Call& call) { launch(uses_much_stack, 1, 32, 0, nullptr, call.data<float>("to")); });
const Operation kForEver("runs_for_ever", [](Call& call) {
    launch(runs_for_ever, 1, 32, 0, nullptr, static_cast<volatile float*>(call.data<float>("x")));
});
const Operation kLaunches("launches", [](Call& call) {
    launch(early_return, static_cast<int>(call.integer("blocks")), static_cast<int>(call.integer("threads")),
           static_cast<std::size_t>(call.integer("shared_bytes")), nullptr);
});

}  // namespace
}  // namespace dobb::emulation
