// Runs a CUDA grid on one thread of the host: one block after another, a fiber for each thread of the block.
#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <memory>
#include <sys/mman.h>

#include "runtime.h"

extern char __start_simt_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_simt_shared[] __attribute__((weak, visibility("hidden")));

namespace simt {

Thread* current;
uint3 block_index, block_size, grid_size;
const Launch* launch;
std::vector<Lane> lanes;
unsigned threads, block_number;
std::string report;

namespace {

constexpr int POISON = 0xA5; // what shared memory holds at the start of a block
const char* const OPERATION_NAMES[] = {"__syncwarp", "__ballot_sync", "__any_sync", "__all_sync", "__uni_sync",
    "__shfl_sync", "__match_any_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_min_sync", "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync"};

Fiber scheduler, abandoned;
std::vector<Warp> warps;
char* stacks;
size_t stack_count;
char* dynamic;
unsigned alive, at_barrier; // threads of the block
uint64_t random_state;
bool gave_up;

Lane* running() { return static_cast<Lane*>(current); }
unsigned lowest(unsigned set) { return __builtin_ctz(set); }
unsigned highest(unsigned set) { return 31 - __builtin_clz(set); }

template <class Visit> void each(const Warp& warp, unsigned set, Visit visit)
{
    for (; set; set &= set - 1)
        visit(warp.lanes[lowest(set)]);
}

unsigned any_of(unsigned set)
{
    for (unsigned skip = random_number() % __builtin_popcount(set); skip; --skip)
        set &= set - 1;
    return lowest(set);
}

// The lane that runs after this one, null if all wait.
Lane* following(const Lane& lane)
{
    const unsigned count = static_cast<unsigned>(warps.size());
    const unsigned here = lane.warp->number;
    if (launch->order == 0) {
        if (const unsigned later = lane.warp->ready & ~((2u << lane.lane) - 1u))
            return lane.warp->lanes + lowest(later);
        for (unsigned i = 0, k = here; i < count; ++i, k = k + 1 == count ? 0 : k + 1)
            if (warps[k].ready)
                return warps[k].lanes + lowest(warps[k].ready);
    } else if (launch->order == 1) {
        if (const unsigned earlier = lane.warp->ready & ((1u << lane.lane) - 1u))
            return lane.warp->lanes + highest(earlier);
        for (unsigned i = 0, k = here; i < count; ++i, k = k ? k - 1 : count - 1)
            if (warps[k].ready)
                return warps[k].lanes + highest(warps[k].ready);
    } else {
        for (unsigned i = 0, k = random_number() % count; i < count; ++i, k = k + 1 == count ? 0 : k + 1)
            if (warps[k].ready)
                return warps[k].lanes + any_of(warps[k].ready);
    }
    return nullptr;
}

unsigned lanes_of(const Warp& warp)
{
    const unsigned left = threads - 32 * warp.number;
    return left >= 32 ? ~0u : (1u << left) - 1u;
}

[[noreturn]] void deadlock()
{
    say("error: deadlock in block %u: no thread can go on", block_number);
    for (const Warp& warp : warps) {
        for (unsigned left = warp.waiting | warp.at_barrier; left;) {
            const Lane& first = warp.lanes[lowest(left)];
            unsigned same = 0;
            each(warp, left, [&](const Lane& lane) {
                if (lane.line == first.line && lane.operation == first.operation && lane.mask == first.mask)
                    same |= 1u << lane.lane;
            });
            if (first.at_block_operation)
                say("  warp %u lanes %08x wait at __syncthreads, line %d", warp.number, same, first.line);
            else
                say("  warp %u lanes %08x wait at %s(mask %08x), line %d", warp.number, same,
                    OPERATION_NAMES[first.operation], first.mask, first.line);
            left &= ~same;
        }
        if (const unsigned exited = lanes_of(warp) & ~warp.alive)
            say("  warp %u lanes %08x have exited", warp.number, exited);
    }
    give_up();
}

// All of `present`, which are those of the mask that live, are at a warp operation: give each its result.
void complete(Warp& warp, unsigned present, const Lane& at)
{
    char what[240];
    unsigned votes = 0, sum = 0, least = ~0u, most = 0, all = ~0u, any = 0, parity = 0;
    int least_signed = std::numeric_limits<int>::max(), most_signed = std::numeric_limits<int>::min();
    each(warp, present, [&](const Lane& lane) {
        if (lane.mask != at.mask || lane.operation != at.operation || lane.line != at.line) {
            snprintf(what, sizeof what,
                     "lanes that name each other in a mask are at different warp operations: "
                     "lane %u %s(%08x) line %d, lane %u %s(%08x) line %d",
                     at.lane, OPERATION_NAMES[at.operation], at.mask, at.line, lane.lane,
                     OPERATION_NAMES[lane.operation], lane.mask, lane.line);
            fail(what, at.line);
        }
        const unsigned value = static_cast<unsigned>(lane.value);
        votes |= (value & 1u) << lane.lane;
        sum += value;
        least = std::min(least, value);
        most = std::max(most, value);
        least_signed = std::min(least_signed, static_cast<int>(value));
        most_signed = std::max(most_signed, static_cast<int>(value));
        all &= value;
        any |= value;
        parity ^= value;
    });
    each(warp, present, [&](Lane& lane) {
        lane.result = 0;
        switch (static_cast<WarpOperation>(lane.operation)) {
        case SYNC: break;
        case BALLOT: lane.result = votes; break;
        case ANY: lane.result = votes != 0; break;
        case ALL: lane.result = votes == present; break;
        case UNIFORM: lane.result = votes == present || !votes; break;
        case SHUFFLE:
            if (lane.source > 31 || !(present >> lane.source & 1)) {
                snprintf(what, sizeof what, "lane %u shuffles from lane %u, which does not take part (lanes %08x do)",
                         lane.lane, lane.source, present);
                fail(what, lane.line);
            }
            lane.result = warp.lanes[lane.source].value;
            break;
        case MATCH:
            each(warp, present, [&](const Lane& other) {
                lane.result |= uint64_t(other.value == lane.value) << other.lane;
            });
            break;
        case ADD: lane.result = sum; break;
        case MIN: lane.result = least; break;
        case MAX: lane.result = most; break;
        case MIN_SIGNED: lane.result = static_cast<unsigned>(least_signed); break;
        case MAX_SIGNED: lane.result = static_cast<unsigned>(most_signed); break;
        case AND: lane.result = all; break;
        case OR: lane.result = any; break;
        case XOR: lane.result = parity; break;
        }
    });
    if (at.operation == SYNC) { // votes and shuffles order no memory, as CUDA says
        static std::vector<Lane*> met;
        met.clear();
        each(warp, present, [&](Lane& lane) { met.push_back(&lane); });
        check_order(met);
    }
    warp.waiting &= ~present;
    warp.ready |= present;
}

// All living threads are at __syncthreads.
void release_block()
{
    static std::vector<Lane*> met;
    met.clear();
    for (const Warp& warp : warps)
        each(warp, warp.at_barrier, [&](Lane& lane) { met.push_back(&lane); });
    int votes = 0;
    for (const Lane* lane : met) {
        votes += lane->value != 0;
        if (lane->line != met[0]->line || lane->operation != met[0]->operation) {
            char what[120];
            snprintf(what, sizeof what, "__syncthreads in divergent code: some threads are at line %d, some at line %d",
                     met[0]->line, lane->line);
            fail(what, lane->line);
        }
    }
    for (Lane* lane : met) {
        switch (static_cast<BlockOperation>(lane->operation)) {
        case BLOCK_SYNC: lane->result = 0; break;
        case BLOCK_COUNT: lane->result = votes; break;
        case BLOCK_AND: lane->result = votes == static_cast<int>(met.size()); break;
        case BLOCK_OR: lane->result = votes != 0; break;
        }
    }
    check_order(met);
    for (Warp& warp : warps) {
        warp.ready |= warp.at_barrier;
        warp.at_barrier = 0;
    }
    at_barrier = 0;
}

void run_lane()
{
    launch->kernel(launch->arguments);
    Lane& lane = *running();
    Warp& warp = *lane.warp;
    warp.alive &= ~(1u << lane.lane);
    warp.ready &= ~(1u << lane.lane);
    --alive;
    // its end can be what others wait for
    for (unsigned left = warp.waiting; left; left &= left - 1) {
        const Lane& other = warp.lanes[lowest(left)];
        const unsigned present = other.mask & warp.alive;
        if (other.mask >> lane.lane & 1 && (warp.waiting & present) == present) {
            complete(warp, present, other);
            break;
        }
    }
    if (alive && at_barrier == alive)
        release_block();
    if (!alive) {
        current = nullptr;
        change(abandoned, scheduler);
    }
    Lane* next = following(lane);
    if (!next)
        deadlock();
    current = next;
    change(abandoned, next->fiber);
    abort();
}

// All lanes of a block in turn, where none waits for another.
void run_lanes()
{
    for (unsigned i = 0; i < threads; ++i) {
        current = &lanes[launch->order == 1 ? threads - 1 - i : i];
        launch->kernel(launch->arguments);
    }
    current = nullptr;
    change(abandoned, scheduler);
    abort();
}

void prepare_lanes()
{
    const size_t wanted = launch->independent ? 1 : threads;
    if (stack_count < wanted) {
        if (stacks)
            munmap(stacks, stack_count * STACK_BYTES);
        void* memory = mmap(nullptr, wanted * STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            abort();
        stacks = static_cast<char*>(memory);
        stack_count = wanted;
    }
    lanes.resize(threads);
    warps.resize((threads + 31) / 32);
    for (unsigned i = 0; i < threads; ++i) {
        Lane& lane = lanes[i];
        lane.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        lane.lane = i % 32;
        lane.number = i;
        lane.warp = &warps[i / 32];
        lane.stack = stacks + (launch->independent ? 0 : i * STACK_BYTES);
    }
    for (unsigned i = 0; i < warps.size(); ++i) {
        warps[i].number = i;
        warps[i].lanes = &lanes[32 * i];
    }
}

void run_block()
{
    for (Lane& lane : lanes)
        lane.fenced = false;
    if (launch->independent) {
        start(lanes[0].fiber, stacks, STACK_BYTES, run_lanes);
        change(scheduler, lanes[0].fiber);
        return;
    }
    for (Warp& warp : warps) {
        warp.alive = warp.ready = lanes_of(warp);
        warp.waiting = warp.at_barrier = 0;
    }
    for (Lane& lane : lanes)
        start(lane.fiber, lane.stack, STACK_BYTES, run_lane);
    alive = threads;
    at_barrier = 0;
    Lane& first = lanes[launch->order == 0 ? 0 : launch->order == 1 ? threads - 1 : random_number() % threads];
    current = &first;
    change(scheduler, first.fiber);
}

} // namespace

uint64_t random_number()
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545F4914F6CDD1Dull >> 16;
}

void say(const char* format, ...)
{
    char line[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    report += line;
    report += '\n';
}

void give_up()
{
    gave_up = true;
    current = nullptr;
    change(abandoned, scheduler);
    abort();
}

void fail(const char* what, int line)
{
    say("error: %s (line %d, block %u thread %u)", what, line, block_number, running()->number);
    give_up();
}

void run_next()
{
    Lane* lane = running();
    Lane* next = following(*lane);
    if (!next)
        deadlock();
    if (next != lane) {
        current = next;
        change(lane->fiber, next->fiber);
    }
}

uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, unsigned source, int line)
{
    Lane& lane = *running();
    Warp& warp = *lane.warp;
    if (!(mask >> lane.lane & 1))
        fail("the calling lane is not in the mask of its own warp operation", line);
    lane.at_block_operation = false;
    lane.operation = operation;
    lane.line = line;
    lane.mask = mask;
    lane.source = source;
    lane.value = value;
    warp.waiting |= 1u << lane.lane;
    warp.ready &= ~(1u << lane.lane);
    const unsigned present = mask & warp.alive;
    const bool last = (warp.waiting & present) == present;
    if (last)
        complete(warp, present, lane);
    if (!last || launch->order > 1)
        run_next();
    return lane.result;
}

int block_operation(BlockOperation operation, bool value, int line)
{
    Lane& lane = *running();
    lane.at_block_operation = true;
    lane.operation = operation;
    lane.line = line;
    lane.mask = 0;
    lane.value = value;
    lane.warp->at_barrier |= 1u << lane.lane;
    lane.warp->ready &= ~(1u << lane.lane);
    const bool last = ++at_barrier == alive;
    if (last)
        release_block();
    if (!last || launch->order > 1)
        run_next();
    return static_cast<int>(lane.result);
}

void* dynamic_shared() { return dynamic; }
void fence() { running()->fenced = true; }

// 0: nothing was found, 1: something was, 2: and the launch did not end.
extern "C" __attribute__((visibility("default"))) int simt_launch(const Launch* asked, char* message, size_t bytes)
{
    launch = asked;
    report.clear();
    gave_up = false;
    random_state = (launch->order + 1) * 0x9E3779B97F4A7C15ull;
    grid_size = {launch->grid[0], launch->grid[1], launch->grid[2]};
    block_size = {launch->block[0], launch->block[1], launch->block[2]};
    threads = block_size.x * block_size.y * block_size.z;
    prepare_lanes();

    std::unique_ptr<char, void (*)(void*)> memory(
        static_cast<char*>(aligned_alloc(256, (launch->dynamic_shared + 511) / 256 * 256)), free);
    dynamic = memory.get();
    const Range shared = {__start_simt_shared, __stop_simt_shared};
    const Range asked_shared = {dynamic, dynamic + launch->dynamic_shared};
    check_launch(shared, asked_shared);

    std::vector<unsigned> blocks(grid_size.x * grid_size.y * grid_size.z);
    for (unsigned i = 0; i < blocks.size(); ++i)
        blocks[i] = i;
    if (launch->order == 1)
        std::reverse(blocks.begin(), blocks.end());
    for (size_t i = blocks.size(); launch->order > 1 && i > 1; --i)
        std::swap(blocks[i - 1], blocks[random_number() % i]);
    for (size_t i = 0; i < blocks.size() && !gave_up; ++i) {
        block_number = blocks[i];
        block_index = {block_number % grid_size.x, block_number / grid_size.x % grid_size.y,
                       block_number / grid_size.x / grid_size.y};
        for (const Range& range : {shared, asked_shared})
            if (range.end > range.start)
                memset(range.start, POISON, range.end - range.start);
        check_block();
        run_block();
    }
    check_end();
    snprintf(message, bytes, "%s", report.c_str());
    return gave_up ? 2 : !report.empty();
}

} // namespace simt
