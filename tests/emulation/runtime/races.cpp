#include "races.h"

#include <dlfcn.h>

#include <cstdint>
#include <map>
#include <sstream>
#include <vector>

#include "dobb_simt.h"

namespace dobb::simt::emulation {
namespace {

constexpr int kSeveral = -1;  // threads, or warps

// Who came by, and when.
struct Stamp {
    std::uint32_t launch = 0;
    int block = 0, warp = 0, thread = 0;
    std::uint32_t block_epoch = 0, warp_epoch = 0;  // barriers met before
};

// What happened last to one byte.
struct Cell {
    Stamp write, read;
    bool copying = false;
};

struct Region {
    std::size_t bytes = 0;
    bool shared = false;
    std::vector<Cell> cells;
};

struct State {
    std::map<std::uintptr_t, Region> global;  // by first address
    Region shared;
    std::uint32_t launch = 0, block_epoch = 0;
    std::vector<std::uint32_t> warp_epochs;
    bool inside = false;
} state;

Stamp now() {
    const int warp = position.thread / kWarp;
    return {state.launch,    position.block,    warp,
            position.thread, state.block_epoch, state.warp_epochs[static_cast<std::size_t>(warp)]};
}

bool ordered(const Stamp& before, const Stamp& here, bool shared) {
    if (before.launch != here.launch) return true;
    if (before.block != here.block) return shared;  // another block's shared memory was there
    return before.block_epoch < here.block_epoch || before.thread == here.thread ||
           (before.warp == here.warp && before.warp_epoch < here.warp_epoch);
}

std::string describe(const Stamp& stamp) {
    if (stamp.thread != kSeveral)
        return "thread " + std::to_string(stamp.thread) + " of block " + std::to_string(stamp.block);
    return "several threads of block " + std::to_string(stamp.block);
}

[[noreturn]] void race(const Region& region, std::size_t byte, const char* what, const std::string& other,
                       const Origin& origin) {
    std::ostringstream message;
    message << "a race: " << what << " byte " << byte << " of "
            << (region.shared ? "shared memory" : "a buffer of " + std::to_string(region.bytes) + " bytes")
            << ", which " << other;
    if (origin.site != nullptr) fault(message.str(), *origin.site);
    Dl_info found;
    if (origin.code != nullptr && dladdr(origin.code, &found) != 0)
        message << "; code at +0x" << std::hex
                << static_cast<const char*>(origin.code) - static_cast<const char*>(found.dli_fbase) - 1;
    fault(message.str());
}

void note(Access access, Region& region, std::size_t byte, const Stamp& here, const Origin& origin) {
    Cell& cell = region.cells[byte];
    const char* what = access == Access::kRead ? "reads" : "writes";
    if (access == Access::kCopyDone) {
        cell = {here, {}, false};
        return;
    }
    if (cell.copying && cell.write.launch == here.launch && cell.write.block == here.block)
        race(region, byte, what, "a copy of " + describe(cell.write) + " may not have reached yet", origin);
    if (!ordered(cell.write, here, region.shared))
        race(region, byte, what, describe(cell.write) + " wrote without a barrier between them", origin);
    const bool reads_ordered = ordered(cell.read, here, region.shared);
    if (access == Access::kRead) {
        const Stamp before = cell.read;
        cell.read = here;
        if (!reads_ordered && before.block == here.block) {
            cell.read.thread = kSeveral;
            if (before.warp != here.warp) cell.read.warp = kSeveral;
        }
        return;
    }
    if (!reads_ordered) race(region, byte, what, describe(cell.read) + " read without a barrier between them", origin);
    cell = {here, {}, access == Access::kCopyUnderWay};
}

}  // namespace

void note_access(Access access, const void* address, std::size_t bytes, const Origin& origin) {
    if (!device.watch_races || !state.inside) return;
    const auto at = reinterpret_cast<std::uintptr_t>(address),
               shared = reinterpret_cast<std::uintptr_t>(position.shared);
    Region* region = nullptr;
    std::uintptr_t begin = shared;
    if (at >= shared && at < shared + position.shared_bytes) {
        region = &state.shared;
    } else {
        auto found = state.global.upper_bound(at);
        if (found == state.global.begin()) return;
        --found;
        if (at >= found->first + found->second.bytes) return;
        region = &found->second;
        begin = found->first;
    }
    const Stamp here = now();
    for (std::size_t i = at - begin; i < at - begin + bytes && i < region->cells.size(); ++i)
        note(access, *region, i, here, origin);
}

void watch_memory(const void* address, std::size_t bytes) {
    if (device.watch_races && bytes > 0)
        state.global[reinterpret_cast<std::uintptr_t>(address)] = {bytes, false, std::vector<Cell>(bytes)};
}

void forget_memory(const void* address) { state.global.erase(reinterpret_cast<std::uintptr_t>(address)); }

void races_enter_launch() { ++state.launch; }

void races_enter_block() {
    if (!device.watch_races) return;
    state.block_epoch = 0;
    state.warp_epochs.assign(static_cast<std::size_t>(position.threads / kWarp), 0);
    state.shared.shared = true;
    if (state.shared.cells.size() < position.shared_bytes) state.shared.cells.resize(position.shared_bytes);
}

void races_meet_block() { ++state.block_epoch; }

void races_meet_warp(int warp) {
    if (device.watch_races) ++state.warp_epochs[static_cast<std::size_t>(warp)];
}

void races_enter_thread(bool inside) { state.inside = inside; }

}  // namespace dobb::simt::emulation

// What the compiler calls at every access of code that is built with -fsanitize=thread.
using dobb::simt::emulation::Access;
using dobb::simt::emulation::note_access;

#define DOBB_ACCESSES_OF(bytes)                                                              \
    void __tsan_read##bytes(void* address) {                                                 \
        note_access(Access::kRead, address, bytes, {nullptr, __builtin_return_address(0)});  \
    }                                                                                        \
    void __tsan_write##bytes(void* address) {                                                \
        note_access(Access::kWrite, address, bytes, {nullptr, __builtin_return_address(0)}); \
    }                                                                                        \
    void __tsan_unaligned_read##bytes(void* address) {                                       \
        note_access(Access::kRead, address, bytes, {nullptr, __builtin_return_address(0)});  \
    }                                                                                        \
    void __tsan_unaligned_write##bytes(void* address) {                                      \
        note_access(Access::kWrite, address, bytes, {nullptr, __builtin_return_address(0)}); \
    }

extern "C" {
DOBB_ACCESSES_OF(1)
DOBB_ACCESSES_OF(2)
DOBB_ACCESSES_OF(4)
DOBB_ACCESSES_OF(8)
DOBB_ACCESSES_OF(16)
void __tsan_read_range(void* address, std::size_t bytes) {
    note_access(Access::kRead, address, bytes, {nullptr, __builtin_return_address(0)});
}
void __tsan_write_range(void* address, std::size_t bytes) {
    note_access(Access::kWrite, address, bytes, {nullptr, __builtin_return_address(0)});
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
