// What is done beside coding: statistics of symbols, lists of live coefficients, and the streams of all groups brought
// together. Columns are tokens of all groups, side by side; a warp is given a group, or a coefficient of one.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

const int LANES = 32;
const u32 ALL = 0xffffffffu;
const int WORD_BITS = 16;
const int GROUP_HEAD = LANES * 32 / WORD_BITS;  // a group's states, in words

// How many lanes below this one are in a vote.
__device__ __forceinline__ u32 rank_in(u32 vote, int lane)
{
    return __popc(vote & ((1u << lane) - 1u));
}

__device__ __forceinline__ i64 warp_number()
{
    return (i64)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
}

// Sum of absolute values of each coefficient in each group, and how many escapes a group has, added to what is there. A
// warp for each group and coefficient.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
measure(const int* __restrict__ symbols, const int* __restrict__ first, const int* __restrict__ tokens, i64* magnitude,
        i64* escapes, int groups, int coefs, int columns)
{
    const i64 number = warp_number();
    if (number >= (i64)groups * coefs) {
        return;
    }
    const i64 group = number % groups;
    const i64 coef = number / groups;
    const int lane = threadIdx.x % LANES;
    const int* const row = symbols + coef * columns + first[group];
    u64 sum = 0;
    u64 large = 0;
    for (int t = lane; t < tokens[group]; t += LANES) {
        const u32 size = row[t] < 0 ? 0u - (u32)row[t] : (u32)row[t];
        sum += size;
        large += size > LARGEST_PLAIN;
    }
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(ALL, sum, distance);
        large += __shfl_xor_sync(ALL, large, distance);
    }
    if (lane == 0) {
        magnitude[group * coefs + coef] = sum;
        if (large) {
            atomicAdd((u64*)escapes + group, large);
        }
    }
}

// Live coefficients are those that a group has a symbol other than 0 of. A thread for each.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
mark_live(const i64* __restrict__ magnitude, u8* flags, i64 count)
{
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) {
        flags[at] = magnitude[at] != 0;
    }
}

// Writes the numbers of the live ones of coefs coefficients, in order, to live [groups, coefs], and how many there are
// before each segment to live_starts [groups, segments + 1]. flags [groups, flags_stride] are those of all
// coefficients, flags_start is the first of them. A warp a group.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
list_live(const u8* __restrict__ flags, i64 flags_start, i64 flags_stride, const int* __restrict__ segment_starts,
          int* live, int* live_starts, int groups, int coefs, int segments)
{
    const i64 group = warp_number();
    if (group >= groups) {
        return;
    }
    const int lane = threadIdx.x % LANES;
    flags += flags_start + group * flags_stride;
    live += group * coefs;
    live_starts += group * (segments + 1);
    int count = 0;
    int segment = 0;
    for (int start = 0; start <= coefs; start += LANES) {
        const int coef = start + lane;
        const bool is_live = coef < coefs && flags[coef];
        const u32 vote = __ballot_sync(ALL, is_live);
        if (is_live) {
            live[count + rank_in(vote, lane)] = coef;
        }
        for (; segment <= segments && segment_starts[segment] < start + LANES; ++segment) {
            if (lane == 0) {
                live_starts[segment] = count + (int)rank_in(vote, segment_starts[segment] - start);
            }
        }
        count += __popc(vote);
    }
}

// Where each group's bytes start in the buffer of all, in 16-bit units: a sum over the groups before. One warp.
extern "C" __global__ void __launch_bounds__(LANES)
scan_sizes(const i64* __restrict__ written, i64* starts, int groups)
{
    const int lane = threadIdx.x % LANES;
    i64 before = 0;
    for (i64 group = lane; group - lane < groups; group += LANES) {
        i64 sum = group < groups ? GROUP_HEAD + written[group] : 0;
        for (int distance = 1; distance < LANES; distance *= 2) {
            const i64 below = __shfl_up_sync(ALL, sum, distance);
            sum += lane >= distance ? below : 0;
        }
        if (group < groups) {
            starts[group + 1] = before + sum;
        }
        before += __shfl_sync(ALL, sum, LANES - 1);
    }
    if (lane == 0) {
        starts[0] = 0;
    }
}

// Compaction: states and words of each group, one after the other. A block a group.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
gather(const u32* __restrict__ states, const u16* __restrict__ words, const i64* __restrict__ word_ends,
       const i64* __restrict__ starts, u16* bytes)
{
    const i64 group = blockIdx.x;
    const i64 start = starts[group];
    const i64 written = starts[group + 1] - start - GROUP_HEAD;
    for (i64 at = threadIdx.x; at < GROUP_HEAD; at += blockDim.x) {
        bytes[start + at] = (u16)(states[group * LANES + at / 2] >> (at % 2 * WORD_BITS));
    }
    for (i64 at = threadIdx.x; at < written; at += blockDim.x) {
        bytes[start + GROUP_HEAD + at] = words[word_ends[group] - written + at];
    }
}
