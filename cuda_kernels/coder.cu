// The interleaved coder on a GPU: entropy_coding/reference.py, byte for byte. Constants in capitals that are not here
// are coder.py's, tables are those of coder_tables.py.
//
// One warp codes one group, a lane a token. A step (32 tokens of one coefficient) has no branch but those that all
// lanes take together, and a short search. What belongs to a coefficient is held by one lane, of 32 in a batch, so that
// it is read and written once a batch; it reaches the other lanes by shuffle. Columns are tokens of all groups, side by
// side. Matrices are [coefs, columns]: neighbouring lanes, neighbouring addresses.
//
// Lanes beyond the group's last token are idle: they code a symbol of probability 1, which changes no state.
//
// Whatever a stream holds, nothing is touched outside the arrays: a word beyond the group's last reads as 0, a class is
// clamped, and a search ends within its class, as frequencies of a class sum to the number of slots.

typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

const int LANES = 32;
const u32 ALL = 0xffffffffu;
const int WORD_BITS = 16;
const u32 LOWEST_STATE = 1u << WORD_BITS;
const u32 TOTAL = 1u << PRECISION;
const int LAST_SHIFT = 32 - PRECISION;            // of a token's last slot in a decoder's entry, above its frequency
const u32 TOKEN_MASK = (1u << ROW_BITS) - 1;
const u32 IDLE = TOKEN_MASK;                      // token of idle lanes; their class is CLASSES
const u32 IDLE_ENTRY = CLASSES << ROW_BITS | IDLE;
const int BUCKETS = (CLASSES + 1) << BUCKET_BITS;
const int SUBUNITS = 1 << SUBUNIT_BITS;
const int CLASS_BITS = UNIT_BITS + SUBUNIT_BITS;  // of a place on the scale axis, below the class
const int PLACES = CLASSES << CLASS_BITS;         // in all classes but that of idle lanes
const int IDLE_PLACE = 1 << 29;                   // whatever a coefficient adds, it is beyond PLACES
const int AHEAD = 8;                              // steps whose memory is read before they are computed
const u32 TOO_LARGE = 1;                          // flag of a group: a symbol is beyond 32 bits
const u32 TOO_MANY = 2;                           // flag of a group: more escapes than there is space for

__device__ __forceinline__ int clamped(int value, int lowest, int highest)
{
    return min(max(value, lowest), highest);
}

// How many lanes below this one are in a vote.
__device__ __forceinline__ u32 rank_in(u32 vote, int lane)
{
    return __popc(vote & ((1u << lane) - 1u));
}

// The reduction changes nothing, but it tells the compiler that a warp's lanes agree: shuffles and votes then need no code
// for lanes that went apart. Launchers keep it below 2^31.
__device__ __forceinline__ i64 warp_number()
{
    return __reduce_max_sync(ALL, blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES);
}

template <class T>
__device__ __forceinline__ void load_table(T* shared, const T* table, int count)
{
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        shared[i] = table[i];
    }
}

// The coefficients of a batch as a lane holds one of them: its number, its place without a token's part, its state.
struct Coefficient {
    int number;
    int place;
    int state;
    int scores;  // sum over the lanes of this row
};

__device__ __forceinline__ Coefficient load_coefficient(
    int at, int end, bool first_row, const int* __restrict__ live, const i16* __restrict__ base, const int* states)
{
    Coefficient mine = {0, 0, 0, 0};
    if (at < end) {
        mine.number = live[at];
        mine.state = first_row ? 0 : states[at];
        mine.place = base[mine.number] * SUBUNITS + mine.state;
    }
    return mine;
}

__device__ __forceinline__ void store_coefficient(const Coefficient& mine, int at, int end, int* states)
{
    if (at < end) {
        states[at] = clamped(mine.state + mine.scores * COEF_RATE, -STATE_LIMIT, STATE_LIMIT);
    }
}

// A lane's token in a segment. Its place is the offset and the token's state together.
struct Token {
    int place;
    int lowest;   // of the place, by the limits of the state
    int highest;
    int last;     // place on the axis that an active or idle lane does not pass
};

__device__ __forceinline__ Token load_token(bool active, bool decays, int offset, int state)
{
    if (!active) {
        return {IDLE_PLACE, IDLE_PLACE, IDLE_PLACE, PLACES};
    }
    const int from = offset * SUBUNITS;
    const int kept = decays ? state - (state >> DECAY_SHIFT) : state;
    return {from + kept, from - STATE_LIMIT, from + STATE_LIMIT, PLACES - 1};
}

__device__ __forceinline__ u32 scale_class(const Token& token, int coefficient_place)
{
    return (u32)clamped(token.place + coefficient_place, 0, token.last) >> CLASS_BITS;
}

__device__ __forceinline__ void update(Token& token, Coefficient& mine, int score, int step, int lane)
{
    token.place = clamped(token.place + score * TOKEN_RATE, token.lowest, token.highest);
    const int sum = __reduce_add_sync(ALL, score);
    mine.scores = lane == step ? sum : mine.scores;
}

// ------------------------------------------------------------------------------------------------------------ encoding

__device__ __forceinline__ u32 magnitude_of(int value)
{
    return value < 0 ? 0u - (u32)value : (u32)value;
}

// A lane's symbol of a step of a batch; 0 beyond its last and in idle lanes.
__device__ __forceinline__ int load_symbol(
    const int* __restrict__ symbols, int columns, bool active, int number, int step, int steps)
{
    const int row = __shfl_sync(ALL, number, step);  // modulo 32
    return active && step < steps ? symbols[(i64)row * columns] : 0;
}

// The token of a symbol that is not plain. Writes its raw bits, if there is space.
__device__ __forceinline__ u32 escape(int symbol, u32* raw, bool has_space)
{
    const u32 excess = magnitude_of(symbol) - LARGEST_PLAIN;
    const int exponent = 31 - __clz((int)excess);
    if (has_space) {
        *raw = (symbol < 0 ? 1u << exponent : 0u) | (excess - (1u << exponent));
    }
    return ESCAPE + exponent;
}

// The encoder's forward pass over the next segments of all groups: a warp a group. Writes what each step codes,
// class << ROW_BITS | token of each lane, and the raw bits of escapes, both in coding order. token_state and flags are
// kept from launch to launch; raw_counts is how many escapes were met.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, BLOCKS_A_MULTIPROCESSOR)
classify(const int* __restrict__ symbols, const i16* __restrict__ score_table, const int* __restrict__ first,
         const int* __restrict__ tokens, const int* __restrict__ live, const int* __restrict__ live_starts,
         const i16* __restrict__ base, i64 base_stride, const i16* __restrict__ offset, int earlier_segments,
         int* token_state, int* coef_state, u16* entries, const i64* __restrict__ entry_starts, u32* raw,
         const i64* __restrict__ raw_starts, i64* raw_counts, u32* flags, int groups, int coefs, int segments,
         int columns)
{
    __shared__ i16 scores[(CLASSES + 1) * SCORE_STRIDE];
    load_table(scores, score_table, (CLASSES + 1) * SCORE_STRIDE);
    __syncthreads();
    const i64 group = warp_number();
    if (group >= groups) {
        return;
    }
    const int lane = threadIdx.x % LANES;
    live += group * coefs;
    coef_state += group * coefs;
    live_starts += group * (segments + 1);
    base += group * base_stride;
    entries += entry_starts[group] + lane;
    raw += raw_starts[group];
    const i64 raw_space = raw_starts[group + 1] - raw_starts[group];
    const int group_tokens = tokens[group];
    i64 raw_count = 0;
    u32 flagged = 0;

    for (int segment = 0; segment < segments; ++segment) {
        const int end = live_starts[segment + 1];
        for (int row = 0; row < group_tokens; row += LANES) {
            const bool active = row + lane < group_tokens;
            const int column = first[group] + row + lane;
            const bool decays = earlier_segments + segment > 0;
            Token token = load_token(active, decays, active ? offset[(i64)segment * columns + column] : 0,
                                     active ? token_state[column] : 0);
            for (int batch = live_starts[segment]; batch < end; batch += LANES) {
                Coefficient mine = load_coefficient(batch + lane, end, row == 0, live, base, coef_state);
                const int steps = min(LANES, end - batch);
                int ahead[AHEAD];
                #pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    ahead[i] = load_symbol(symbols + column, columns, active, mine.number, i, steps);
                }
                for (int from = 0; from < steps; from += AHEAD) {
                    #pragma unroll
                    for (int i = 0; i < AHEAD; ++i) {
                        const int step = from + i;
                        const int symbol = ahead[i];
                        ahead[i] = load_symbol(symbols + column, columns, active, mine.number, step + AHEAD, steps);
                        if (step >= steps) {
                            continue;
                        }
                        const u32 size = magnitude_of(symbol);
                        u32 code = active ? 2 * size - (symbol > 0) : IDLE;
                        const u32 escapes = __ballot_sync(ALL, size > LARGEST_PLAIN);
                        if (escapes) {
                            if (size > LARGEST_PLAIN) {
                                const i64 at = raw_count + rank_in(escapes, lane);
                                code = escape(symbol, raw + at, at < raw_space);
                                flagged |= size > LARGEST_VALUE ? TOO_LARGE : 0;
                            }
                            raw_count += __popc(escapes);
                        }
                        const u32 row_class = scale_class(token, __shfl_sync(ALL, mine.place, step));
                        *entries = (u16)(row_class << ROW_BITS | code);
                        entries += LANES;
                        update(token, mine, scores[row_class * SCORE_STRIDE + code], step, lane);
                    }
                }
                store_coefficient(mine, batch + lane, end, coef_state);
            }
            if (active) {
                token_state[column] = token.place - (token.lowest + STATE_LIMIT);
            }
        }
    }

    flagged = __reduce_or_sync(ALL, flagged);
    if (lane == 0) {
        raw_counts[group] = raw_count;
        flags[group] |= flagged | (raw_count > raw_space ? TOO_MANY : 0);
    }
}

// A lane's entry of a step; idle before step 0.
__device__ __forceinline__ u32 load_entry(const u16* __restrict__ entries, i64 step)
{
    return step >= 0 ? entries[step * LANES] : IDLE_ENTRY;
}

// All lanes call this together: those that are full put a word each before next, in lane order.
__device__ __forceinline__ u32 normalised(u32 state, bool full, u16*& next, int lane)
{
    const u32 givers = __ballot_sync(ALL, full);
    next -= __popc(givers);
    if (full) {
        next[rank_in(givers, lane)] = (u16)state;
    }
    return full ? state >> WORD_BITS : state;
}

// Codes the raw bits of lanes that have any, the last piece first. raw is behind those of this step, and moves before
// them. All lanes call this together.
__device__ __forceinline__ u32 encode_raw(u32 state, bool large, u32 symbol, const u32*& raw, u16*& next, int lane)
{
    const u32 escapes = __ballot_sync(ALL, large);
    raw -= __popc(escapes);
    const u32 value = large ? raw[rank_in(escapes, lane)] : 0;
    const int all_bits = large ? (int)(symbol - ESCAPE) + 1 : 0;
    for (int shift = RAW_PIECE; shift >= 0; shift -= RAW_PIECE) {
        const int bits = clamped(all_bits - shift, 0, RAW_PIECE);
        state = normalised(state, bits > 0 && state >> (32 - max(bits, 1)), next, lane);
        state = state << bits | (value >> shift & ((1u << bits) - 1));
    }
    return state;
}

// The encoder's backward pass over the steps of one forward pass: a warp a group. states and written, how many words,
// are kept from launch to launch; words are written backwards from word_ends. A code is [frequency, start] of 16 bits
// each and the reciprocal floor((2^32 - 1) / frequency). Groups with a flag are left alone.
//
// The high word of state * reciprocal is floor(state / frequency) or one less, for any state: the reciprocal is at
// least (2^32 - frequency) / frequency, so the product / 2^32 is more than state / frequency - 1.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, BLOCKS_A_MULTIPROCESSOR)
encode(const u16* __restrict__ entries, const i64* __restrict__ entry_starts, const u32* __restrict__ raw,
       const i64* __restrict__ raw_starts, const i64* __restrict__ raw_counts, const u32* __restrict__ flags,
       const uint2* __restrict__ code_table, u32* states, u16* words, const i64* __restrict__ word_ends, i64* written,
       int groups)
{
    __shared__ uint2 codes[(CLASSES + 1) << ROW_BITS];
    load_table(codes, code_table, (CLASSES + 1) << ROW_BITS);
    __syncthreads();
    const i64 group = warp_number();
    if (group >= groups || flags[group]) {
        return;
    }
    const int lane = threadIdx.x % LANES;
    entries += entry_starts[group] + lane;
    const u32* raw_end = raw + raw_starts[group] + raw_counts[group];
    u16* const end = words + word_ends[group];
    u16* next = end - written[group];
    u32 state = states[group * LANES + lane];
    const i64 steps = (entry_starts[group + 1] - entry_starts[group]) / LANES;
    u32 ahead[AHEAD];
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        ahead[i] = load_entry(entries, steps - 1 - i);
    }
    for (i64 from = steps - 1; from >= 0; from -= AHEAD) {
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const u32 entry = ahead[i];
            ahead[i] = load_entry(entries, from - i - AHEAD);
            const u32 symbol = entry & TOKEN_MASK;
            const bool large = symbol >= ESCAPE && symbol != IDLE;
            if (__any_sync(ALL, large)) {
                state = encode_raw(state, large, symbol, raw_end, next, lane);
            }
            const uint2 code = codes[entry];
            const u32 frequency = code.x & 0xffff;
            state = normalised(state, state >> (32 - PRECISION) >= frequency, next, lane);
            const u32 quotient = __umulhi(state, code.y);
            const u32 rest = state - quotient * frequency;
            state = (quotient << PRECISION) + rest + (code.x >> 16);
            state += rest >= frequency ? TOTAL - frequency : 0;
        }
    }

    states[group * LANES + lane] = state;
    __syncwarp();  // all lanes have read written
    if (lane == 0) {
        written[group] = end - next;
    }
}

// ------------------------------------------------------------------------------------------------------------ decoding

// The group's next words, a lane holding one of each 32. They are read 64 words before they are needed.
struct Words {
    u32 taken;          // of those in now, below LANES
    u32 now;
    u32 next;
    u32 later;
    const u16* beyond;  // of what is held
    i64 left;           // from there to the end of the group
};

__device__ __forceinline__ u32 load_word(Words& words)
{
    const u32 word = words.left > 0 ? *words.beyond : 0;
    words.beyond += LANES;
    words.left -= LANES;
    return word;
}

__device__ __forceinline__ Words open_words(const u16* words, i64 count, i64 position, int lane)
{
    Words opened = {0, 0, 0, 0, words + position + lane, count - position - lane};
    opened.now = load_word(opened);
    opened.next = load_word(opened);
    opened.later = load_word(opened);
    return opened;
}

// How many words of the group's count are taken.
__device__ __forceinline__ i64 position_of(const Words& words, i64 count, int lane)
{
    return count - words.left - lane - 3 * LANES + words.taken;
}

// All lanes call this together: those whose state is low take a word each, in lane order.
__device__ __forceinline__ u32 renormalised(u32 state, Words& words, int lane)
{
    const bool low = state < LOWEST_STATE;
    const u32 takers = __ballot_sync(ALL, low);
    const u32 held = lane < (int)words.taken ? words.next : words.now;
    const u32 word = __shfl_sync(ALL, held, words.taken + rank_in(takers, lane));  // modulo 32
    words.taken += __popc(takers);
    if (words.taken >= LANES) {
        words.taken -= LANES;
        words.now = words.next;
        words.next = words.later;
        words.later = load_word(words);
    }
    return low ? state << WORD_BITS | word : state;
}

// Of lanes whose code is beyond LARGEST_PLAIN, the value that their raw bits tell. All lanes call this together.
__device__ __forceinline__ int decode_raw(int code, u32& state, Words& words, int lane, u32& damage)
{
    const int exponent = code - LARGEST_PLAIN - 1;
    u32 raw = 0;
    for (int shift = 0; shift < 2 * RAW_PIECE; shift += RAW_PIECE) {
        const int bits = min(exponent + 1 - shift, RAW_PIECE);
        if (bits > 0) {
            raw |= (state & ((1u << bits) - 1)) << shift;
            state >>= bits;
        }
        state = renormalised(state, words, lane);
    }
    if (exponent < 0) {
        return code;
    }
    const u32 magnitude = LARGEST_PLAIN + (1u << exponent) + (raw & ((1u << exponent) - 1));
    damage |= magnitude > LARGEST_VALUE ? TOO_LARGE : 0;
    return (int)(raw >> exponent ? 0u - magnitude : magnitude);
}

// Decodes the next segments of all groups: a warp a group. states, positions (in words), damage and token_state are
// kept from launch to launch. An entry is a token's last slot << LAST_SHIFT | frequency, and its score << 16 | value or
// code; a bucket says where in the entries, in bytes, the search for a slot begins.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, BLOCKS_A_MULTIPROCESSOR)
decode(const u16* __restrict__ words, const i64* __restrict__ word_starts, const uint2* __restrict__ entry_table,
       const u16* __restrict__ bucket_table, const int* __restrict__ first, const int* __restrict__ tokens,
       const int* __restrict__ live, const int* __restrict__ live_starts, const i16* __restrict__ base, i64 base_stride,
       const i16* __restrict__ offset, int earlier_segments, u32* states, i64* positions, u32* damage, int* token_state,
       int* coef_state, int* symbols, int groups, int coefs, int segments, int columns)
{
    __shared__ uint2 tables[DECODE_ENTRIES + BUCKETS / 4];
    load_table(tables, entry_table, DECODE_ENTRIES);
    load_table((u16*)(tables + DECODE_ENTRIES), bucket_table, BUCKETS);
    __syncthreads();
    // groups is not negative. As the compiler does not know that, it keeps this address: from sm_90 on it would compute
    // it anew, slowly, in each step.
    const u8* const entries = (const u8*)tables + min(groups, 0);
    const u16* const buckets = (const u16*)(entries + DECODE_ENTRIES * sizeof(uint2));
    const i64 group = warp_number();
    if (group >= groups) {
        return;
    }
    const int lane = threadIdx.x % LANES;
    live += group * coefs;
    coef_state += group * coefs;
    live_starts += group * (segments + 1);
    base += group * base_stride;
    const int group_tokens = tokens[group];
    const u32 row_bytes = (u32)columns * (u32)sizeof(int);
    u32 state = states[group * LANES + lane];
    u32 damaged = 0;
    words += word_starts[group];
    const i64 word_count = word_starts[group + 1] - word_starts[group];
    Words next_words = open_words(words, word_count, positions[group], lane);

    for (int segment = 0; segment < segments; ++segment) {
        const int end = live_starts[segment + 1];
        u8* out = (u8*)(symbols + first[group] + lane);
        for (int row = 0; row < group_tokens; row += LANES) {
            const bool active = row + lane < group_tokens;
            const int column = first[group] + row + lane;
            const bool decays = earlier_segments + segment > 0;
            Token token = load_token(active, decays, active ? offset[(i64)segment * columns + column] : 0,
                                     active ? token_state[column] : 0);
            for (int batch = live_starts[segment]; batch < end; batch += LANES) {
                Coefficient mine = load_coefficient(batch + lane, end, row == 0, live, base, coef_state);
                const int steps = min(LANES, end - batch);
                for (int step = 0; step < steps; ++step) {
                    const u32 row_class = scale_class(token, __shfl_sync(ALL, mine.place, step));
                    const u32 slot = state & (TOTAL - 1);
                    u32 at = buckets[row_class << BUCKET_BITS | slot >> (PRECISION - BUCKET_BITS)];
                    uint2 entry = *(const uint2*)(entries + at);
                    while (entry.x < state << LAST_SHIFT) {  // as long as the slot is behind the token's last
                        at += sizeof(uint2);
                        entry = *(const uint2*)(entries + at);
                    }
                    const u32 frequency = entry.x & ((1u << LAST_SHIFT) - 1);
                    state = frequency * (state >> PRECISION) + (slot - 1 + frequency - (entry.x >> LAST_SHIFT));
                    state = renormalised(state, next_words, lane);
                    update(token, mine, (int)entry.y >> 16, step, lane);
                    int value = (i16)entry.y;
                    if (__any_sync(ALL, value > LARGEST_PLAIN)) {
                        value = decode_raw(value, state, next_words, lane, damaged);
                    }
                    const u64 row_at = (u64)(u32)__shfl_sync(ALL, mine.number, step) * row_bytes;
                    if (active) {
                        *(int*)(out + row_at) = value;
                    }
                }
                store_coefficient(mine, batch + lane, end, coef_state);
            }
            out += LANES * sizeof(int);
            if (active) {
                token_state[column] = token.place - (token.lowest + STATE_LIMIT);
            }
        }
    }

    states[group * LANES + lane] = state;
    damaged = __reduce_or_sync(ALL, damaged);
    __syncwarp();  // all lanes have read positions
    if (lane == 0) {
        positions[group] = position_of(next_words, word_count, lane);
        damage[group] |= damaged;
    }
}
