// Switching between stacks on one thread, for the emulated threads of a block.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace dobb::simt::emulation {

// A place to come back to. Sanitizers are told of every switch, so that they know the stack they are on.
class Fiber {
  public:
    Fiber() = default;  // the stack that is running now
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Gives it a stack, on which `entry` starts at the next switch to it. It must not return. Again on one that was
    // left for good in the middle: it starts anew.
    void prepare(void (*entry)());

    // Stops this one and goes on with `next`.
    void switch_to(Fiber& next);

    // To be called first by `entry`: `from` is the fiber that switched here.
    static void arrived(Fiber& from);

  private:
    std::byte* mapped_ = nullptr;  // with a guard at its low end that cannot be touched
    const void* stack_ = nullptr;
    std::size_t stack_bytes_ = 0;
    void* fake_stack_ = nullptr;  // of the address sanitizer
    void* stack_pointer_ = nullptr;
    ucontext_t context_;  // where there is no assembly for the processor
};

}  // namespace dobb::simt::emulation
