// Small kernels, each with mistakes that the emulator must see. `bug` says which one a kernel makes, 0 none; the
// numbers are listed in test_emulator.py.
#define ALL 0xffffffffu

// A warp packs a chunk of values: the codes of those whose code is not 0, in order, into the chunk's slot of words.
// length is a multiple of 32. codes: [256], 0 to 255. masks: a bit for each value. sums: of each lane's codes.
extern "C" __global__ void __launch_bounds__(128)
pack(const unsigned char* __restrict__ values, const unsigned char* __restrict__ codes,
     unsigned short* __restrict__ words, unsigned* __restrict__ counts, unsigned* __restrict__ masks,
     unsigned* __restrict__ sums, int chunks, int length, int total, int bug)
{
    __shared__ unsigned char table[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        table[i] = codes[i];
    __syncthreads();
    const int lane = threadIdx.x & 31;
    const int chunk = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (chunk >= chunks)
        return;
    unsigned short* slot = words + chunk * (bug == 2 ? length - 1 : length);
    const int base = chunk * length;
    const int count = min(length, total - base);
    unsigned position = 0, sum = 0;
    for (int i = lane; i < ((count + 31) & ~31); i += 32) {
        const unsigned code = i < count ? table[values[base + i]] : 0u;
        const bool stored = bug == 1 ? code > 1u : code > 0u;
        const unsigned mask = __ballot_sync(ALL, stored);
        if (stored)
            slot[position + __popc(mask & ((1u << lane) - 1u))] = code;
        if (lane == 0)
            masks[(base + i) >> 5] = mask;
        position += __popc(mask);
        sum += code;
    }
    sums[chunk * 32 + lane] = sum;
    if (lane == 0)
        counts[chunk] = position;
}

// Inverse of pack, of words without gaps: chunk c has those from offsets[c] on. Counts damaged chunks in `bad`.
extern "C" __global__ void __launch_bounds__(128)
unpack(const unsigned short* __restrict__ words, const unsigned* __restrict__ offsets,
       const unsigned* __restrict__ masks, const unsigned* __restrict__ sums, const unsigned char* __restrict__ decode,
       unsigned char* __restrict__ values, unsigned* __restrict__ bad, int chunks, int length, int total, int bug)
{
    __shared__ unsigned char table[256];
    const int lane = threadIdx.x & 31;
    const int chunk = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (bug == 6 && chunk >= chunks)
        return;
    for (int i = threadIdx.x; i < 256 + (bug == 2); i += blockDim.x)
        table[i] = decode[i];
    if (bug != 1)
        __syncthreads();
    if (chunk >= chunks)
        return;
    const unsigned short* slot = words + offsets[chunk];
    const unsigned stored_words = offsets[chunk + 1] - offsets[chunk];
    const int base = chunk * length;
    const int count = min(length, total - base);
    const unsigned below = (bug == 5 ? 2u << lane : 1u << lane) - 1u;
    unsigned position = 0, sum = 0;
    for (int i = lane; i < ((count + 31) & ~31); i += 32) {
        const bool stored = masks[(base + i) >> 5] >> lane & 1u;
        unsigned mask = 0;
        if (bug != 4 || i < count)
            mask = __ballot_sync(ALL, stored);
        const unsigned at = position + __popc(mask & below);
        const unsigned code = stored && (at < stored_words || bug == 3) ? slot[at] : 0u;
        if (i < count)
            values[base + i] = table[code & 255u];
        position += __popc(mask);
        sum += code;
    }
    const unsigned wrong = __ballot_sync(ALL, sum != sums[chunk * 32 + lane + (bug == 7)]);
    if (lane == 0 && (wrong != 0u || position != stored_words))
        atomicAdd(bad, 1u);
}

extern "C" __global__ void histogram(const unsigned char* __restrict__ values, unsigned* __restrict__ counts, int total,
                                     int bug)
{
    __shared__ unsigned bins[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (bug != 3)
            bins[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        if (bug == 1)
            bins[values[i]]++;
        else
            atomicAdd(&bins[values[i]], 1u);
    }
    if (bug != 2)
        __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) {
        if (bug == 4)
            counts[i] += bins[i];
        else
            atomicAdd(&counts[i], bins[i]);
    }
}

// out[t] = sum over k of weights[t, k] * rows[index[t, k]], in order. Dynamic shared memory: 8 bytes for each k.
extern "C" __global__ void weighted_rows(const float* __restrict__ weights, const int* __restrict__ index,
                                         const float* __restrict__ rows, float* __restrict__ out, int k, int width,
                                         int bug)
{
    extern __shared__ unsigned char staged[];
    float* weight = (float*)staged;
    int* row = (int*)(staged + 4 * k);
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        weight[i] = weights[blockIdx.x * k + i];
        row[i] = index[blockIdx.x * k + i];
    }
    if (bug != 2)
        __syncthreads();
    for (int channel = threadIdx.x; channel < width; channel += blockDim.x) {
        float sum = 0.f;
        for (int i = 0; i < k; ++i)
            sum = __fmaf_rn(weight[i], rows[row[i] * width + channel], sum);
        out[blockIdx.x * width + channel] = sum;
    }
}

// A warp finds the largest of the absolute values of each row of 32.
extern "C" __global__ void largest(const float* __restrict__ values, float* __restrict__ out, int rows, int bug)
{
    const int lane = threadIdx.x & 31;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= rows)
        return;
    float most = fabsf(values[row * 32 + lane]);
    for (int step = 16; step; step >>= 1) {
        if (bug == 1)
            most = fmaxf(most, __shfl_xor_sync(0xffffu, most, step));
        else if (bug != 2)
            most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
        else if (lane)
            most = fmaxf(most, __shfl_xor_sync(0xfffffffeu, most, step));
    }
    if (lane == 0)
        out[row] = most;
}

// A warp adds up 32 values through shared memory. Blocks of 64 threads.
extern "C" __global__ void warp_sum(const float* __restrict__ values, float* __restrict__ out, int bug)
{
    __shared__ float memory[64];
    const int lane = threadIdx.x & 31;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    float* sums = memory + (threadIdx.x & ~31);
    sums[lane] = values[thread];
    for (int step = 16; step; step >>= 1) {
        if (bug == 3)
            __ballot_sync(ALL, 1);
        else if (bug != 1)
            __syncwarp();
        const float other = lane < step ? sums[lane + step] : 0.f;
        if (bug == 3)
            __ballot_sync(ALL, 1);
        else if (bug != 1 && bug != 2)
            __syncwarp();
        sums[lane] += other;
    }
    if (lane == 0)
        out[thread >> 5] = sums[0];
}

// Reverses tiles of 64, one after the other, through one buffer.
extern "C" __global__ void reverse(const int* __restrict__ values, int* __restrict__ out, int tiles, int bug)
{
    __shared__ int buffer[64];
    for (int tile = 0; tile < tiles; ++tile) {
        buffer[threadIdx.x] = values[tile * 64 + threadIdx.x];
        if (bug == 3 && threadIdx.x < 16)
            __syncwarp();
        if (bug == 2 && threadIdx.x < 32)
            __syncthreads();
        else
            __syncthreads();
        out[tile * 64 + threadIdx.x] = buffer[63 - threadIdx.x];
        if (bug != 1)
            __syncthreads();
    }
}

// The block that comes last adds up what the blocks found. Blocks of 64 threads.
extern "C" __global__ void total(const int* __restrict__ values, int* found, unsigned* ticket, int* out, int bug)
{
    __shared__ int sum;
    if (threadIdx.x == 0)
        sum = 0;
    __syncthreads();
    atomicAdd(&sum, values[blockIdx.x * 64 + threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) {
        found[blockIdx.x] = sum;
        if (bug != 1)
            __threadfence();
        if (atomicAdd(ticket, 1u) == gridDim.x - 1) {
            int all = 0;
            for (unsigned i = 0; i < gridDim.x; ++i)
                all += found[i];
            *out = all;
        }
    }
}

// How many flags are set up to each lane's own. One warp.
extern "C" __global__ void rank(const unsigned* __restrict__ flags, unsigned* __restrict__ out, int bug)
{
    const unsigned lane = threadIdx.x;
    const unsigned mask = __ballot_sync(ALL, flags[lane] != 0u);
    const unsigned up_to_own = lane == 31u && bug != 1 ? ALL : (1u << (lane + 1u)) - 1u;
    out[lane] = __popc(mask & up_to_own);
}

// Two values as one.
extern "C" __global__ void pair(const unsigned short* __restrict__ values, unsigned* __restrict__ out, int bug)
{
    const unsigned short* own = values + 2 * threadIdx.x;
    out[threadIdx.x] = bug == 1 ? *(const unsigned*)(own + 1) : __byte_perm(own[0], own[1], 0x5410);
}

// Copies, and more.
extern "C" __global__ void copy(const int* __restrict__ values, int* __restrict__ out, int total, int bug)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    while (bug == 2 && out[0] != -1)
        out[i] = 0;
    if (i < total)
        out[i] = values[i] + (bug == 3 ? 0x7fffffff : 0);
    if (bug == 1)
        ((int*)values)[i] = 0;
}
