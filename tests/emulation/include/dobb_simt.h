// What the kernels use of a GPU, for the host compiler: the same names as csrc/common/cuda/ptx/dobb_simt.h.
//
// A kernel's threads run as fibers on one core, so a .cu file compiled with this header runs where no GPU is, under the
// host's sanitizers. Warp-wide functions move fragments between the lanes as the hardware does. What a GPU leaves
// undefined (lanes that diverge, misaligned vectors, a copy that nobody waited for) is an error here, or NaN.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <type_traits>

#define DOBB_DEVICE inline
#define DOBB_HOST_DEVICE inline
#define DOBB_KERNEL(threads, blocks) void
#define DOBB_UNROLL
#define DOBB_NO_UNROLL

namespace dobb::simt {

using Stream = void*;

constexpr int kWarp = 32;

struct alignas(16) Quad {
    std::uint32_t x[4];
};
struct alignas(8) Pair {
    std::uint32_t x[2];
};

namespace emulation {

using Site = std::source_location;

// Order in which the threads that can run do run. A kernel without a race gives the same bits under all of them.
enum class Order {
    kForward,   // the lowest thread first, so that a warp runs as far as it can
    kBackward,  // the highest first, and the last block first
    kRotating,  // another warp after every stop
    kShuffled,  // by chance, from the seed; blocks too
};

// What the host functions below answer, and the schedule.
struct Device {
    int multiprocessors = 3;
    int resident_blocks = 2;
    std::size_t most_shared_memory = 227 * 1024;
    Order order = Order::kForward;
    std::uint64_t seed = 0;
    bool watch_races = false;
};
extern Device device;

// Where the running thread is.
struct Position {
    int thread = 0, threads = 0, block = 0, blocks = 0;
    std::byte* shared = nullptr;
    std::size_t shared_bytes = 0;
};
extern Position position;

enum class Operation {
    kBarrier,
    kWarpBarrier,
    kShuffle,
    kLoadMatrices,
    kLoadMatricesTransposed,
    kMultiplyAddBf16,
    kMultiplyAddFp16,
};

struct Shuffle {
    std::uint32_t value;
    int mask;
    std::uint32_t found;
};
struct LoadMatrices {
    std::uint32_t* x;
    const void* row;
};
struct MultiplyAdd {
    float* d;
    const std::uint32_t* a;
    std::uint32_t b[2];
};

// Stops this thread until all others of its block or warp have come to the same operation at the same place, and the
// operation is done. `argument` is one of the structs above, or null.
void meet(Operation operation, void* argument, const Site& site);

// Ends the launch with an error that tells the thread and the place.
[[noreturn]] void fault(const std::string& message, const Site& site);
[[noreturn]] void fault(const std::string& message);

void check_aligned(const void* address, std::size_t bytes, const char* what, const Site& site);
void check_shared(const void* address, std::size_t bytes, const char* what, const Site& site);
void note_read(const void* address, std::size_t bytes, const Site& site);
void add_atomically(unsigned long long* to, unsigned long long x);
void add_copy(void* shared, const void* global, std::size_t bytes, const Site& site);
void commit_copies();
void finish_copies(int pending);

std::uint32_t bf16_bits(float x);
std::uint32_t fp16_bits(float x);

struct Grid {
    int blocks, threads;
    std::size_t shared_bytes;
    Site site;
};
// Calls `kernel(arguments)` as every thread of the grid.
void run(const Grid& grid, void (*kernel)(const void* arguments), const void* arguments);

// The number of blocks and, by conversion at the call, the place of the launch.
struct Blocks {
    int number;
    Site site;
    Blocks(int number_of_blocks, Site where = Site::current()) : number(number_of_blocks), site(where) {}
};

template <class T>
T load(const T* from, const Site& site) {
    check_aligned(from, sizeof(T), "load_once", site);
    return *from;
}
template <class T>
void store(T* to, T x, const Site& site) {
    check_aligned(to, sizeof(T), "store_once", site);
    *to = x;
}

inline std::uint32_t shuffle(std::uint32_t x, int mask, const Site& site) {
    Shuffle argument{x, mask, 0};
    meet(Operation::kShuffle, &argument, site);
    return argument.found;
}

inline void load_matrices(Operation operation, std::uint32_t (&x)[4], const void* row, const Site& site) {
    check_aligned(row, 16, "load_matrices", site);
    check_shared(row, 16, "load_matrices", site);
    note_read(row, 16, site);
    LoadMatrices argument{x, row};
    meet(operation, &argument, site);
}

inline void multiply_add(Operation operation, float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                         std::uint32_t b1, const Site& site) {
    MultiplyAdd argument{d, a, {b0, b1}};
    meet(operation, &argument, site);
}

}  // namespace emulation

inline int thread_index() { return emulation::position.thread; }
inline int thread_count() { return emulation::position.threads; }
inline int block_index() { return emulation::position.block; }
inline int block_count() { return emulation::position.blocks; }
inline std::byte* shared_memory() { return emulation::position.shared; }

inline void barrier(emulation::Site site = emulation::Site::current()) {
    emulation::meet(emulation::Operation::kBarrier, nullptr, site);
}
inline void warp_barrier(emulation::Site site = emulation::Site::current()) {
    emulation::meet(emulation::Operation::kWarpBarrier, nullptr, site);
}

inline float shuffle_xor(float x, int mask, emulation::Site site = emulation::Site::current()) {
    return std::bit_cast<float>(emulation::shuffle(std::bit_cast<std::uint32_t>(x), mask, site));
}
inline int shuffle_xor(int x, int mask, emulation::Site site = emulation::Site::current()) {
    return std::bit_cast<int>(emulation::shuffle(std::bit_cast<std::uint32_t>(x), mask, site));
}

inline void atomic_add(unsigned long long* to, unsigned long long x,
                       emulation::Site site = emulation::Site::current()) {
    emulation::check_aligned(to, sizeof(*to), "atomic_add", site);
    emulation::add_atomically(to, x);
}

template <class T>
T load_once(const T* from, emulation::Site site = emulation::Site::current()) {
    static_assert(std::is_same_v<T, Quad> || std::is_same_v<T, Pair> || std::is_same_v<T, std::uint32_t> ||
                  std::is_same_v<T, std::uint16_t>);
    return emulation::load(from, site);
}
inline void store_once(Quad* to, Quad x, emulation::Site site = emulation::Site::current()) {
    emulation::store(to, x, site);
}
inline void store_once(Pair* to, Pair x, emulation::Site site = emulation::Site::current()) {
    emulation::store(to, x, site);
}
inline void store_once(std::uint32_t* to, std::uint32_t x, emulation::Site site = emulation::Site::current()) {
    emulation::store(to, x, site);
}
inline void store_once(std::uint16_t* to, std::uint16_t x, emulation::Site site = emulation::Site::current()) {
    emulation::store(to, x, site);
}

inline void copy_async(void* shared, const void* global, emulation::Site site = emulation::Site::current()) {
    emulation::add_copy(shared, global, 16, site);
}
inline void copy_async_8(void* shared, const void* global, emulation::Site site = emulation::Site::current()) {
    emulation::add_copy(shared, global, 8, site);
}
inline void copy_async_commit() { emulation::commit_copies(); }
template <int kPending>
void copy_async_wait() {
    emulation::finish_copies(kPending);
}

inline float bits_to_float(std::uint32_t x) { return std::bit_cast<float>(x); }
inline std::uint32_t float_to_bits(float x) { return std::bit_cast<std::uint32_t>(x); }
inline std::uint32_t pack_bf16(float low, float high) {
    return emulation::bf16_bits(low) | emulation::bf16_bits(high) << 16;
}
inline std::uint32_t pack_fp16(float low, float high) {
    return emulation::fp16_bits(low) | emulation::fp16_bits(high) << 16;
}

inline void load_matrices(std::uint32_t (&x)[4], const void* row, emulation::Site site = emulation::Site::current()) {
    emulation::load_matrices(emulation::Operation::kLoadMatrices, x, row, site);
}
inline void load_matrices_transposed(std::uint32_t (&x)[4], const void* row,
                                     emulation::Site site = emulation::Site::current()) {
    emulation::load_matrices(emulation::Operation::kLoadMatricesTransposed, x, row, site);
}

inline void multiply_add_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                              emulation::Site site = emulation::Site::current()) {
    emulation::multiply_add(emulation::Operation::kMultiplyAddBf16, d, a, b0, b1, site);
}
inline void multiply_add_fp16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                              emulation::Site site = emulation::Site::current()) {
    emulation::multiply_add(emulation::Operation::kMultiplyAddFp16, d, a, b0, b1, site);
}

// ---- From the host ----

inline int multiprocessors() { return emulation::device.multiprocessors; }
inline std::size_t most_shared_memory() { return emulation::device.most_shared_memory; }

template <class... Parameters>
int resident_blocks(void (*)(Parameters...), int, std::size_t shared_bytes) {
    return shared_bytes > emulation::device.most_shared_memory ? 0 : emulation::device.resident_blocks;
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), emulation::Blocks blocks, int threads, std::size_t shared_bytes, Stream,
            Parameters... parameters) {
    static_assert((std::is_trivially_copyable_v<Parameters> && ...), "a GPU gets a copy of the bytes");
    static_assert((sizeof(Parameters) + ... + 0) <= 4000, "CUDA passes at most about 4 KB of parameters");
    const auto thread = [&] { kernel(parameters...); };
    emulation::run(
        {blocks.number, threads, shared_bytes, blocks.site},
        [](const void* call) { (*static_cast<decltype(&thread)>(call))(); }, &thread);
}

}  // namespace dobb::simt
