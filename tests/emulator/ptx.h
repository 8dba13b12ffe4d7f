// What PTX instructions do, for the C++ that ptx.py writes. Registers are unsigned integers of their width, and bools.
#pragma once

#include "simt.h"

namespace ptx {

template <size_t bytes> struct alignas(bytes) Parameter {
    unsigned char memory[bytes];
};

template <class T> constexpr bool is_float = std::is_floating_point<T>::value || std::is_same<T, _Float16>::value;
template <size_t bytes>
using Bits = typename std::conditional<
    bytes == 2, uint16_t, typename std::conditional<bytes == 4, uint32_t, uint64_t>::type>::type;
template <class T> using Unsigned = typename std::make_unsigned<T>::type;

template <class T, class Register> inline T get(Register value)
{
    if constexpr (is_float<T>)
        return __builtin_bit_cast(T, static_cast<Bits<sizeof(T)>>(value));
    else
        return static_cast<T>(value);
}
template <class Register, class T> inline void set(Register& to, T value)
{
    if constexpr (is_float<T>)
        to = __builtin_bit_cast(Bits<sizeof(T)>, value);
    else
        to = static_cast<Register>(value); // of a signed integer the sign is extended
}

// Addresses of shared memory are offsets: first what the module declares, then the launch's.
template <size_t bytes> inline char* shared(char (&declared)[bytes], uint64_t offset)
{
    return offset < bytes ? declared + offset : static_cast<char*>(simt::dynamic_shared()) + (offset - bytes);
}
template <class T> inline __attribute__((always_inline)) T& at(char* address) { return *reinterpret_cast<T*>(address); }
inline void check_aligned(const char* address, size_t bytes, int line)
{
    if (reinterpret_cast<uintptr_t>(address) % bytes)
        simt::fail("misaligned access to a vector", line);
}

template <class T> inline T multiply(T x, T y) { return static_cast<T>(uint64_t(x) * uint64_t(y)); }
template <class T> inline T divide(T x, T y)
{
    if (y == 0)
        return static_cast<T>(-1);
    if (std::is_signed<T>::value && y == static_cast<T>(-1))
        return static_cast<T>(0 - static_cast<Unsigned<T>>(x));
    return x / y;
}
template <class T> inline T remainder(T x, T y)
{
    if (y == 0)
        return x;
    return std::is_signed<T>::value && y == static_cast<T>(-1) ? 0 : x % y;
}
template <class T> inline T shift_left(T x, uint32_t by) { return by < sizeof(T) * 8 ? static_cast<T>(x << by) : 0; }
template <class T> inline T shift_right(T x, uint32_t by)
{
    return by < sizeof(T) * 8 ? static_cast<T>(x >> by) : static_cast<T>(x < 0 ? -1 : 0);
}
template <class T> inline T minimum(T x, T y)
{
    if constexpr (is_float<T>) {
        if (x != x || y != y)
            return x != x ? y : x;
        if (x == y)
            return std::signbit(x) ? x : y;
    }
    return x < y ? x : y;
}
template <class T> inline T maximum(T x, T y)
{
    if constexpr (is_float<T>) {
        if (x != x || y != y)
            return x != x ? y : x;
        if (x == y)
            return std::signbit(x) ? y : x;
    }
    return x > y ? x : y;
}
// A float that is a whole number, as an integer: the nearest there is.
template <class To, class From> inline To to_integer(From x)
{
    constexpr To least = std::numeric_limits<To>::min(), most = std::numeric_limits<To>::max();
    const double value = static_cast<double>(x);
    if (value != value)
        return sizeof(To) == 8 || sizeof(From) == 8 ? static_cast<To>(Unsigned<To>(1) << (sizeof(To) * 8 - 1)) : 0;
    if (value <= static_cast<double>(least))
        return least;
    return value >= static_cast<double>(most) ? most : static_cast<To>(value);
}

enum Shuffle { UP, BUTTERFLY, INDEX };
// clamp: the last lane that can be read, and in bits 8 to 12 the bits of a lane's number that say which part it is in.
inline uint32_t shuffle(Shuffle kind, uint32_t x, uint32_t by, uint32_t clamp, uint32_t mask, bool& inside, int line)
{
    const int lane = static_cast<int>(simt::current->lane);
    const int part = clamp >> 8 & 31;
    const int last = (lane & part) | (clamp & 31 & ~part);
    const int step = by & 31;
    const int source = kind == UP ? lane - step : kind == BUTTERFLY ? lane ^ step : (lane & part) | (step & ~part);
    inside = kind == UP ? source >= last : source <= last;
    return static_cast<uint32_t>(simt::warp_operation(simt::SHUFFLE, mask, x, inside ? source : lane, line));
}

} // namespace ptx
