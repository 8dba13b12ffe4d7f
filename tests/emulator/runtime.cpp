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
std::vector<Warp> warps;
unsigned threads, alive, block_number;
std::string report;

namespace {

constexpr int POISON = 0xA5; // what shared memory holds at the start of a block

Fiber scheduler, abandoned;
char* stacks;
size_t stack_count;
char* dynamic;
uint64_t random_state;
bool gave_up;

unsigned highest(unsigned set) { return 31 - __builtin_clz(set); }

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

void run_lane()
{
    launch->kernel(launch->arguments);
    Lane& lane = *running();
    end_lane(lane);
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
    start_block();
    for (Lane& lane : lanes)
        start(lane.fiber, lane.stack, STACK_BYTES, run_lane);
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
