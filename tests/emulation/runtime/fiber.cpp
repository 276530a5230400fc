#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define DOBB_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DOBB_ADDRESS_SANITIZER 1
#endif
#endif
#ifdef DOBB_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// swapcontext asks the kernel for the signal mask at every switch, which would be most of the running time.
#if defined(__x86_64__) && defined(__linux__) && !defined(DOBB_PORTABLE_SWITCH)
#define DOBB_OWN_SWITCH 1
extern "C" void dobb_emulation_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.globl dobb_emulation_switch
.type dobb_emulation_switch, @function
dobb_emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size dobb_emulation_switch, .-dobb_emulation_switch
)");
constexpr int kSavedRegisters = 6;
#endif

namespace dobb::simt::emulation {
namespace {

// Frames are larger under sanitizers, and one that is too large must not jump over the guard.
constexpr std::size_t kStack = 256 * 1024, kGuard = 1024 * 1024;

}  // namespace

Fiber::~Fiber() {
    if (mapped_ != nullptr) munmap(mapped_, kGuard + kStack);
}

void Fiber::prepare(void (*entry)()) {
    if (mapped_ == nullptr) {
        void* found = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) throw std::bad_alloc();
        mapped_ = static_cast<std::byte*>(found);
        mprotect(mapped_, kGuard, PROT_NONE);
    }
    stack_ = mapped_ + kGuard;
    stack_bytes_ = kStack;
    fake_stack_ = nullptr;
#ifdef DOBB_ADDRESS_SANITIZER
    __asan_unpoison_memory_region(stack_, stack_bytes_);  // frames that were left in the middle
#endif
#ifdef DOBB_OWN_SWITCH
    // As if `entry` had been called with this stack: a return address of null, then what the switch pops.
    auto* top = reinterpret_cast<std::uintptr_t*>(mapped_ + kGuard + kStack);
    *--top = 0;
    *--top = reinterpret_cast<std::uintptr_t>(entry);
    for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
    stack_pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = mapped_ + kGuard;
    context_.uc_stack.ss_size = kStack;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
}

void Fiber::switch_to(Fiber& next) {
#ifdef DOBB_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(&fake_stack_, next.stack_, next.stack_bytes_);
#endif
#ifdef DOBB_OWN_SWITCH
    dobb_emulation_switch(&stack_pointer_, next.stack_pointer_);
#else
    swapcontext(&context_, &next.context_);
#endif
#ifdef DOBB_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::arrived([[maybe_unused]] Fiber& from) {
#ifdef DOBB_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, &from.stack_, &from.stack_bytes_);
#endif
}

}  // namespace dobb::simt::emulation
