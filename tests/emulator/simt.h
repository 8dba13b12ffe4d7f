// What CUDA C++ gives a kernel without being asked, for g++. It is included before the kernel's text.
//
// Of floating point only what IEEE 754 fixes to the bit is here: __expf, rsqrtf and the like are left out on purpose.
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
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("simt_shared"))) // one section, so that the runtime knows its extent
#define SIMT_LINE int line = __builtin_LINE()
#define SIMT_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

struct uint3 {
    unsigned x, y, z;
};
using dim3 = uint3;

// ---------------------------------------------------------------------------------- what the runtime does for a kernel
namespace simt {

struct Thread {
    uint3 index;
    unsigned lane;
};
extern Thread* current; // the CUDA thread that runs
extern uint3 block_index, block_size, grid_size;

enum WarpOperation { SYNC, BALLOT, ANY, ALL, UNIFORM, SHUFFLE, MATCH, ADD, MIN, MAX, MIN_SIGNED, MAX_SIGNED, AND, OR,
                     XOR };
enum BlockOperation { BLOCK_SYNC, BLOCK_COUNT, BLOCK_AND, BLOCK_OR };

// Wait for the lanes of mask (for all threads of the block). `source` is the lane that a shuffle reads.
uint64_t warp_operation(WarpOperation, unsigned mask, uint64_t value, unsigned source, int line);
int block_operation(BlockOperation, bool value, int line);
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
static inline void __syncthreads(SIMT_LINE) { simt::block_operation(simt::BLOCK_SYNC, false, line); }
static inline int __syncthreads_count(int p, SIMT_LINE) { return simt::block_operation(simt::BLOCK_COUNT, p, line); }
static inline int __syncthreads_and(int p, SIMT_LINE) { return simt::block_operation(simt::BLOCK_AND, p, line); }
static inline int __syncthreads_or(int p, SIMT_LINE) { return simt::block_operation(simt::BLOCK_OR, p, line); }
static inline void __syncwarp(unsigned mask = ~0u, SIMT_LINE) { simt::warp_operation(simt::SYNC, mask, 0, 0, line); }

#define SIMT_WARP(name, result, type, operation, value)                                                                \
    static inline result name(unsigned mask, type x, SIMT_LINE)                                                        \
    {                                                                                                                  \
        return static_cast<result>(simt::warp_operation(simt::operation, mask, value, 0, line));                       \
    }
SIMT_WARP(__ballot_sync, unsigned, int, BALLOT, x != 0)
SIMT_WARP(__any_sync, int, int, ANY, x != 0)
SIMT_WARP(__all_sync, int, int, ALL, x != 0)
SIMT_WARP(__uni_sync, int, int, UNIFORM, x != 0)
SIMT_WARP(__reduce_add_sync, unsigned, unsigned, ADD, x)
SIMT_WARP(__reduce_add_sync, int, int, ADD, static_cast<unsigned>(x))
SIMT_WARP(__reduce_min_sync, unsigned, unsigned, MIN, x)
SIMT_WARP(__reduce_max_sync, unsigned, unsigned, MAX, x)
SIMT_WARP(__reduce_min_sync, int, int, MIN_SIGNED, static_cast<unsigned>(x))
SIMT_WARP(__reduce_max_sync, int, int, MAX_SIGNED, static_cast<unsigned>(x))
SIMT_WARP(__reduce_and_sync, unsigned, unsigned, AND, x)
SIMT_WARP(__reduce_or_sync, unsigned, unsigned, OR, x)
SIMT_WARP(__reduce_xor_sync, unsigned, unsigned, XOR, x)

template <class T> static inline unsigned __match_any_sync(unsigned mask, T value, SIMT_LINE)
{
    return static_cast<unsigned>(simt::warp_operation(simt::MATCH, mask, simt::bits_of(value), 0, line));
}
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
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_LINE)
{
    const unsigned lane = simt::current->lane;
    const bool beyond = (lane & (width - 1u)) + by >= static_cast<unsigned>(width);
    return simt_shuffle(mask, value, beyond ? lane : lane + by, line);
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
SIMT_ATOMIC(atomicSub, x - y)
SIMT_ATOMIC(atomicMin, y < x ? y : x)
SIMT_ATOMIC(atomicMax, y > x ? y : x)
SIMT_ATOMIC(atomicAnd, x& y)
SIMT_ATOMIC(atomicOr, x | y)
SIMT_ATOMIC(atomicXor, x ^ y)
SIMT_ATOMIC(atomicExch, y)
template <class T>
static inline T atomicCAS(T* address, typename simt_same<T>::type expected, typename simt_same<T>::type y)
{
    return simt_atomic(address, [expected, y](T x) -> T { return x == expected ? y : x; });
}
static inline void __threadfence() { simt::fence(); }
static inline void __threadfence_block() { simt::fence(); }

// ------------------------------------------------------------------------------------------------------------ integers
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(uint64_t(x) * y >> 32); }
static inline int __mulhi(int x, int y) { return static_cast<int>(int64_t(x) * y >> 32); }
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
static inline unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i)
        reversed |= (x >> i & 1u) << (31 - i);
    return reversed;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by)
{
    return static_cast<unsigned>((uint64_t(high) << 32 | low) << (by & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by)
{
    return static_cast<unsigned>((uint64_t(high) << 32 | low) >> (by & 31));
}
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

// ---------------------------------------------------------------------------------------------- loads, vectors, floats
template <class T> static inline T __ldg(const T* address) { return *address; }
template <class T> static inline T __ldcs(const T* address) { return *address; }
template <class T> static inline void __stcs(T* address, T value) { *address = value; }

#define SIMT_VECTORS(T, name)                                                                                          \
    struct alignas(2 * sizeof(T)) name##2 {                                                                            \
        T x, y;                                                                                                        \
    };                                                                                                                 \
    struct alignas(4 * sizeof(T)) name##4 {                                                                            \
        T x, y, z, w;                                                                                                  \
    };                                                                                                                 \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                  \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIMT_VECTORS(signed char, char)
SIMT_VECTORS(unsigned char, uchar)
SIMT_VECTORS(short, short)
SIMT_VECTORS(unsigned short, ushort)
SIMT_VECTORS(int, int)
SIMT_VECTORS(unsigned, uint)
SIMT_VECTORS(float, float)

static inline float min(float x, float y) { return fminf(x, y); }
static inline float max(float x, float y) { return fmaxf(x, y); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
static inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(simt::bits_of(x)); }
static inline int __float_as_int(float x) { return static_cast<int>(simt::bits_of(x)); }
static inline float __uint_as_float(unsigned x) { return simt::value_of<float>(x); }
static inline float __int_as_float(int x) { return simt::value_of<float>(static_cast<unsigned>(x)); }

// A whole number as an integer: the nearest there is, `nan` if it is none.
template <class T> static inline T simt_saturated(double x, T nan = 0)
{
    if (x != x)
        return nan;
    if (x <= static_cast<double>(std::numeric_limits<T>::min()))
        return std::numeric_limits<T>::min();
    if (x >= static_cast<double>(std::numeric_limits<T>::max()))
        return std::numeric_limits<T>::max();
    return static_cast<T>(x);
}
static inline int __float2int_rn(float x) { return simt_saturated<int>(rint(x)); }
static inline int __float2int_rz(float x) { return simt_saturated<int>(trunc(x)); }
static inline int __float2int_rd(float x) { return simt_saturated<int>(floor(x)); }
static inline unsigned __float2uint_rn(float x) { return simt_saturated<unsigned>(rint(x)); }
static inline void __trap(SIMT_LINE) { simt::fail("__trap", line); }

// -------------------------------------------------------------------------------------- what a launch asks of a kernel
namespace simt {

// Of each parameter: is it a pointer (P) or not (S), to what (k: constant, m: mutable), the size of that, and whether
// that is an unsigned (u) or signed integer (i), a float (f), or something else (V).
template <class... Parameters> const char* signature(void (*)(Parameters...))
{
    static char text[64 * 8];
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
