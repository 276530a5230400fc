// What the kernels use of a GPU: one short function an instruction, and the launch.
//
// tests/emulation has a header of this name for the host compiler, with the same functions and the same fragments in
// the same lanes. Kernels include it as <dobb_simt.h>; the folder on the include path decides which one they get.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#define DOBB_DEVICE __device__ __forceinline__
#define DOBB_HOST_DEVICE __host__ __device__ inline
#define DOBB_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define DOBB_UNROLL _Pragma("unroll")
#define DOBB_NO_UNROLL _Pragma("unroll 1")

namespace dobb::simt {

using Stream = cudaStream_t;

constexpr int kWarp = 32;

// Thread of the block, block of the grid, and their numbers. All kernels are one-dimensional.
DOBB_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
DOBB_DEVICE int thread_count() { return static_cast<int>(blockDim.x); }
DOBB_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
DOBB_DEVICE int block_count() { return static_cast<int>(gridDim.x); }

// The dynamic shared memory of the block, aligned to 16 bytes.
DOBB_DEVICE std::byte* shared_memory() {
    extern __shared__ __align__(16) std::byte dobb_shared[];
    return dobb_shared;
}

// All threads of the block; all lanes of the warp.
DOBB_DEVICE void barrier() { __syncthreads(); }
DOBB_DEVICE void warp_barrier() { __syncwarp(); }

// The value of lane `lane ^ mask`.
DOBB_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DOBB_DEVICE int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

DOBB_DEVICE void atomic_add(unsigned long long* to, unsigned long long x) { atomicAdd(to, x); }

struct alignas(16) Quad {
    std::uint32_t x[4];
};
struct alignas(8) Pair {
    std::uint32_t x[2];
};

// Global memory that this kernel touches once: read and write it without keeping it in the caches.
DOBB_DEVICE Quad load_once(const Quad* from) {
    const uint4 found = __ldcs(reinterpret_cast<const uint4*>(from));
    return {found.x, found.y, found.z, found.w};
}
DOBB_DEVICE Pair load_once(const Pair* from) {
    const uint2 found = __ldcs(reinterpret_cast<const uint2*>(from));
    return {found.x, found.y};
}
DOBB_DEVICE std::uint32_t load_once(const std::uint32_t* from) { return __ldcs(from); }
DOBB_DEVICE std::uint16_t load_once(const std::uint16_t* from) { return __ldcs(from); }
DOBB_DEVICE void store_once(Quad* to, Quad x) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(x.x[0], x.x[1], x.x[2], x.x[3]));
}
DOBB_DEVICE void store_once(Pair* to, Pair x) { __stcs(reinterpret_cast<uint2*>(to), make_uint2(x.x[0], x.x[1])); }
DOBB_DEVICE void store_once(std::uint32_t* to, std::uint32_t x) { __stcs(to, x); }
DOBB_DEVICE void store_once(std::uint16_t* to, std::uint16_t x) { __stcs(to, x); }

// Sixteen bytes from global to shared memory, behind the thread's back; both aligned to 16 bytes.
DOBB_DEVICE void copy_async(void* shared, const void* global) {
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
// The same for eight bytes.
DOBB_DEVICE void copy_async_8(void* shared, const void* global) {
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
}
DOBB_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's committed groups are under way.
template <int kPending>
DOBB_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

DOBB_DEVICE float bits_to_float(std::uint32_t x) { return __uint_as_float(x); }
DOBB_DEVICE std::uint32_t float_to_bits(float x) { return __float_as_uint(x); }

// Two bf16, rounded to nearest even, `low` in the low half.
DOBB_DEVICE std::uint32_t pack_bf16(float low, float high) {
    std::uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
// The same for fp16.
DOBB_DEVICE std::uint32_t pack_fp16(float low, float high) {
    std::uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Four 8x8 matrices of 16-bit entries from shared memory. Lane 8 i + r gives the address of row r of matrix i, aligned
// to 16 bytes; lane 4 r + c receives entries 2 c and 2 c + 1 of row r of matrix i in x[i]. The transposed load gives
// lane 4 c + r entries (2 r, c) and (2 r + 1, c).
DOBB_DEVICE void load_matrices(std::uint32_t (&x)[4], const void* row) {
    const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
DOBB_DEVICE void load_matrices_transposed(std::uint32_t (&x)[4], const void* row) {
    const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

// d += a b for a [16, 16] and b [16, 8] of bf16 or fp16, sums in fp32. With r = lane / 4 and c = 2 (lane % 4):
//   a: x[0] = (r, c), (r, c + 1); x[1] = (r + 8, ...); x[2] = (r, c + 8), (r, c + 9); x[3] = (r + 8, c + 8), ...
//   b: x[0] = (c, r), (c + 1, r); x[1] = (c + 8, r), (c + 9, r)
//   d: x[0], x[1] = (r, c), (r, c + 1); x[2], x[3] = (r + 8, c), (r + 8, c + 1)
DOBB_DEVICE void multiply_add_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DOBB_DEVICE void multiply_add_fp16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- From the host, for the current device ----

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Bytes of shared memory that one block can have.
inline std::size_t most_shared_memory() {
    return static_cast<std::size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

// Blocks of a kernel that one multiprocessor runs at once.
template <class... Parameters>
int resident_blocks(void (*kernel)(Parameters...), int threads, std::size_t shared_bytes) {
    int blocks = 0;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return blocks;
}

// Launches on a stream without waiting; safe inside a graph capture.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), int blocks, int threads, std::size_t shared_bytes, Stream stream,
            Parameters... parameters) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
    void* arguments[] = {&parameters...};
    check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                           dim3(static_cast<unsigned>(threads)), arguments, shared_bytes, stream),
          "cudaLaunchKernel");
}

}  // namespace dobb::simt
