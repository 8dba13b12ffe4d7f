// Where threads wait for each other: warp operations and __syncthreads.
#include <algorithm>

#include "runtime.h"

namespace simt {
namespace {

const char* const OPERATION_NAMES[] = {"__syncwarp", "__ballot_sync", "__any_sync", "__all_sync",
                                       "__shfl_sync", "__reduce_add_sync", "__reduce_max_sync", "__reduce_or_sync"};

unsigned waiting_threads; // at __syncthreads

unsigned lanes_of(const Warp& warp)
{
    const unsigned left = threads - 32 * warp.number;
    return left >= 32 ? ~0u : (1u << left) - 1u;
}

// All of `present`, which are those of the mask that live, are at a warp operation: give each its result.
void complete(Warp& warp, unsigned present, const Lane& at)
{
    char what[240];
    unsigned votes = 0, sum = 0, most = 0, any = 0;
    each(warp, present, [&](const Lane& lane) {
        if (lane.mask != at.mask || lane.operation != at.operation || lane.line != at.line) {
            snprintf(what, sizeof what,
                     "lanes that name each other in a mask are at different warp operations: "
                     "lane %u %s(%08x) line %d, lane %u %s(%08x) line %d",
                     at.lane, OPERATION_NAMES[at.operation], at.mask, at.line, lane.lane,
                     OPERATION_NAMES[lane.operation], lane.mask, lane.line);
            fail(what, at.line);
        }
        votes |= static_cast<unsigned>(lane.value & 1u) << lane.lane;
        sum += static_cast<unsigned>(lane.value);
        most = std::max(most, static_cast<unsigned>(lane.value));
        any |= static_cast<unsigned>(lane.value);
    });
    each(warp, present, [&](Lane& lane) {
        switch (static_cast<WarpOperation>(lane.operation)) {
        case SYNC: break;
        case BALLOT: lane.result = votes; break;
        case ANY: lane.result = votes != 0; break;
        case ALL: lane.result = votes == present; break;
        case ADD: lane.result = sum; break;
        case MAX: lane.result = most; break;
        case OR: lane.result = any; break;
        case SHUFFLE:
            if (lane.source > 31 || !(present >> lane.source & 1)) {
                snprintf(what, sizeof what, "lane %u shuffles from lane %u, which does not take part (lanes %08x do)",
                         lane.lane, lane.source, present);
                fail(what, lane.line);
            }
            lane.result = warp.lanes[lane.source].value;
            break;
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
    for (const Lane* lane : met) {
        if (lane->line != met[0]->line) {
            char what[120];
            snprintf(what, sizeof what, "__syncthreads in divergent code: some threads are at line %d, some at line %d",
                     met[0]->line, lane->line);
            fail(what, lane->line);
        }
    }
    check_order(met);
    for (Warp& warp : warps) {
        warp.ready |= warp.at_barrier;
        warp.at_barrier = 0;
    }
    waiting_threads = 0;
}

} // namespace

void start_block()
{
    waiting_threads = 0;
    alive = threads;
    for (Warp& warp : warps) {
        warp.alive = warp.ready = lanes_of(warp);
        warp.waiting = warp.at_barrier = 0;
    }
}

uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, unsigned source, int line)
{
    Lane& lane = *running();
    Warp& warp = *lane.warp;
    if (!(mask >> lane.lane & 1))
        fail("the calling lane is not in the mask of its own warp operation", line);
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

void block_barrier(int line)
{
    Lane& lane = *running();
    lane.operation = SYNC;
    lane.line = line;
    lane.mask = 0;
    lane.warp->at_barrier |= 1u << lane.lane;
    lane.warp->ready &= ~(1u << lane.lane);
    const bool last = ++waiting_threads == alive;
    if (last)
        release_block();
    if (!last || launch->order > 1)
        run_next();
}

void end_lane(Lane& lane)
{
    Warp& warp = *lane.warp;
    warp.alive &= ~(1u << lane.lane);
    warp.ready &= ~(1u << lane.lane);
    --alive;
    // it can be what others wait for
    for (unsigned left = warp.waiting; left; left &= left - 1) {
        const Lane& other = warp.lanes[lowest(left)];
        const unsigned present = other.mask & warp.alive;
        if (other.mask >> lane.lane & 1 && (warp.waiting & present) == present) {
            complete(warp, present, other);
            break;
        }
    }
    if (alive && waiting_threads == alive)
        release_block();
}

void deadlock()
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
            if (!first.mask)
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

} // namespace simt
