// What CUDA C++ gives a kernel without being asked, for g++. It is included before the kernel's text.
//
// It has what kernels here use. Of floating point that is only what IEEE 754 fixes to the bit: __expf, rsqrtf and the
// like are left out on purpose.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("simt_shared"))) // one section, so that the runtime knows its extent
#define SIMT_LINE int line = __builtin_LINE()
#define SIMT_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

struct uint3 {
    unsigned x, y, z;
};

// ---------------------------------------------------------------------------------- what the runtime does for a kernel
namespace simt {

struct Thread {
    uint3 index;
    unsigned lane;
};
extern Thread* current; // the CUDA thread that runs
extern uint3 block_index, block_size, grid_size;

enum WarpOperation { SYNC, BALLOT, ANY, ALL, SHUFFLE, ADD, MAX, OR };

// Wait for the lanes of mask. `source` is the lane that a shuffle reads.
uint64_t warp_operation(WarpOperation, unsigned mask, uint64_t value, unsigned source, int line);
void block_barrier(int line);
void* dynamic_shared();
void fence();
[[noreturn]] void fail(const char* what, int line);

// The bits of a value of up to 8 bytes, and the value of bits.
template <class T> SIMT_UNCHECKED inline uint64_t bits_of(T value)
{
    static_assert(sizeof(T) <= 8 && std::is_arithmetic<T>::value, "a number of at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> SIMT_UNCHECKED inline T value_of(uint64_t bits)
{
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

} // namespace simt

#define threadIdx (simt::current->index)
#define blockIdx simt::block_index
#define blockDim simt::block_size
#define gridDim simt::grid_size
static constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------------- barriers, votes, shuffles
static inline void __syncthreads(SIMT_LINE) { simt::block_barrier(line); }
static inline void __syncwarp(unsigned mask = ~0u, SIMT_LINE) { simt::warp_operation(simt::SYNC, mask, 0, 0, line); }

#define SIMT_WARP(name, result, type, operation, value)                                                                \
    static inline result name(unsigned mask, type x, SIMT_LINE)                                                        \
    {                                                                                                                  \
        return static_cast<result>(simt::warp_operation(simt::operation, mask, value, 0, line));                       \
    }
SIMT_WARP(__ballot_sync, unsigned, int, BALLOT, x != 0)
SIMT_WARP(__any_sync, int, int, ANY, x != 0)
SIMT_WARP(__all_sync, int, int, ALL, x != 0)
SIMT_WARP(__reduce_add_sync, unsigned, unsigned, ADD, x)
SIMT_WARP(__reduce_add_sync, int, int, ADD, static_cast<unsigned>(x))
SIMT_WARP(__reduce_max_sync, unsigned, unsigned, MAX, x)
SIMT_WARP(__reduce_or_sync, unsigned, unsigned, OR, x)

template <class T> static inline T simt_shuffle(unsigned mask, T value, unsigned source, int line)
{
    return simt::value_of<T>(simt::warp_operation(simt::SHUFFLE, mask, simt::bits_of(value), source, line));
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_LINE)
{
    const unsigned first = simt::current->lane & ~(width - 1u);
    return simt_shuffle(mask, value, first | (source & (width - 1u)), line);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_LINE)
{
    const unsigned lane = simt::current->lane;
    return simt_shuffle(mask, value, by > (lane & (width - 1u)) ? lane : lane - by, line);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32, SIMT_LINE)
{
    const unsigned lane = simt::current->lane;
    const unsigned source = lane ^ with;
    return simt_shuffle(mask, value, source >= (lane & ~(width - 1u)) + width ? lane : source, line);
}

// ------------------------------------------------------------------------------------------------------------- atomics
// Relaxed as in CUDA. Built on the compiler's, so that the checker knows them for what they are.
template <class T, class Change> static inline T simt_atomic(T* address, Change change)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics are of 4 or 8 bytes");
    using Word = typename std::conditional<sizeof(T) == 4, unsigned, unsigned long long>::type;
    Word* word = reinterpret_cast<Word*>(address);
    Word before = __atomic_load_n(word, __ATOMIC_RELAXED);
    Word after;
    do {
        after = static_cast<Word>(simt::bits_of(static_cast<T>(change(simt::value_of<T>(before)))));
    } while (!__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return simt::value_of<T>(before);
}
template <class T> struct simt_same {
    using type = T; // keeps an argument from choosing T
};
#define SIMT_ATOMIC(name, changed)                                                                                     \
    template <class T> static inline T name(T* address, typename simt_same<T>::type y)                                 \
    {                                                                                                                  \
        return simt_atomic(address, [y]([[maybe_unused]] T x) -> T { return changed; });                               \
    }
SIMT_ATOMIC(atomicAdd, x + y)
SIMT_ATOMIC(atomicMax, y > x ? y : x)

static inline void __threadfence() { simt::fence(); }

// ------------------------------------------------------------------------------------------------------------ integers
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(uint64_t(x) * y >> 32); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    const uint64_t both = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
#define SIMT_MIN_MAX(T)                                                                                                \
    static inline T min(T x, T y) { return y < x ? y : x; }                                                            \
    static inline T max(T x, T y) { return x < y ? y : x; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)

// ----------------------------------------------------------------------------------------------------- vectors, floats
struct alignas(8) uint2 {
    unsigned x, y;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }

// -------------------------------------------------------------------------------------- what a launch asks of a kernel
namespace simt {

// Of each parameter: is it a pointer (P) or not (S), to what (k: constant, m: mutable), the size of that, and whether
// that is an unsigned (u) or signed integer (i), a float (f), or something else (V).
template <class... Parameters> const char* signature(void (*)(Parameters...))
{
    static char text[4096];
    size_t length = 0;
    (
        [&] {
            using Target = typename std::remove_pointer<Parameters>::type;
            using Plain = typename std::remove_cv<Target>::type;
            const char kind = std::is_floating_point<Plain>::value ? 'f'
                              : std::is_unsigned<Plain>::value     ? 'u'
                              : std::is_integral<Plain>::value     ? 'i'
                                                                   : 'V';
            const bool pointer = std::is_pointer<Parameters>::value;
            length += snprintf(text + length, sizeof text - length, "%c%c%zu%c;", pointer ? 'P' : 'S',
                               std::is_const<Target>::value ? 'k' : 'm', sizeof(Plain), kind);
        }(),
        ...);
    return text;
}
template <class... Parameters, size_t... I>
SIMT_UNCHECKED void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>)
{
    kernel(*static_cast<Parameters*>(arguments[I])...);
}
template <class... Parameters> SIMT_UNCHECKED void call(void (*kernel)(Parameters...), void** arguments)
{
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

} // namespace simt

#define SIMT_EXPORT extern "C" __attribute__((visibility("default"))) SIMT_UNCHECKED
#define SIMT_KERNEL(kernel, launch_bound)                                                                              \
    SIMT_EXPORT int simt_most_threads_##kernel() { return launch_bound; }                                              \
    SIMT_EXPORT const char* simt_signature_##kernel() { return simt::signature(&kernel); }                             \
    SIMT_EXPORT void simt_call_##kernel(void** arguments) { simt::call(&kernel, arguments); }
