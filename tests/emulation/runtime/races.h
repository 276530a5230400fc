// Finds accesses of two threads to one byte that nothing orders: no barrier of the block, no warp_barrier of their
// warp, no end of a launch lies between them, and one of them writes.
//
// The compiler reports every access of the kernels' code: it is built with -fsanitize=thread, and races.cpp stands in
// for the library of that sanitizer, which would watch the host's threads instead.
#pragma once

#include <cstddef>
#include <source_location>

namespace dobb::simt::emulation {

enum class Access {
    kRead,
    kWrite,
    kCopyUnderWay,  // a write that ends at an unknown time before kCopyDone
    kCopyDone,
};

// Where the access is: a place in the source, or else an address in the code, or neither.
struct Origin {
    const std::source_location* site = nullptr;
    const void* code = nullptr;
};

void note_access(Access access, const void* address, std::size_t bytes, const Origin& origin);

// Global memory; accesses to what is neither this nor shared memory are not looked at.
void watch_memory(const void* address, std::size_t bytes);
void forget_memory(const void* address);

void races_enter_launch();
void races_enter_block();
void races_meet_block();
void races_meet_warp(int warp);
// Whether the code that runs is a thread of a kernel.
void races_enter_thread(bool inside);

}  // namespace dobb::simt::emulation
