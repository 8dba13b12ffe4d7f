// What the runtime and the checker share.
#pragma once

#include <string>
#include <vector>

#include "fiber.h"
#include "simt.h" // after all other headers: it defines words that they use

namespace simt {

struct Warp;

struct Lane : Thread {
    unsigned number; // of the thread in its block
    Warp* warp;
    char* stack;
    Fiber fiber;
    bool fenced; // has passed a __threadfence
    // where it waits, or waited last: a warp operation, or where the mask is 0, __syncthreads
    int operation, line;
    unsigned mask, source;
    uint64_t value, result;
};

struct Warp { // sets of lanes
    unsigned number;
    Lane* lanes;
    unsigned alive, ready, waiting, at_barrier;
};

constexpr size_t STACK_BYTES = 128 << 10;

struct Region { // memory that a launch may touch. Mirrored in host_cuda.py, as Launch is.
    char* start;
    size_t bytes;
    uint8_t* initialised; // of each byte, kept by the array's owner; null if all of it is
    int read_only;
    const char* name;
};

struct Launch {
    void (*kernel)(void** arguments);
    void** arguments;
    unsigned grid[3], block[3];
    size_t dynamic_shared;
    const Region* regions;
    size_t region_count;
    uint64_t order;         // of lanes and blocks: 0 ascending, 1 descending, others are seeds
    unsigned preempt;       // a lane loses its turn at one access in so many; 0: only where it waits
    uint64_t most_accesses; // beyond this a loop is taken for endless
    int independent;        // no lane waits for another
};

struct Range {
    char *start, *end;
};

extern const Launch* launch;
extern std::vector<Lane> lanes; // of the block, and its warps
extern std::vector<Warp> warps;
extern unsigned threads, alive, block_number; // threads of the block, and those that have not ended
extern std::string report; // what was found, a line each

inline Lane* running() { return static_cast<Lane*>(current); }
inline unsigned lowest(unsigned set) { return __builtin_ctz(set); }
template <class Visit> void each(const Warp& warp, unsigned set, Visit visit)
{
    for (; set; set &= set - 1)
        visit(warp.lanes[lowest(set)]);
}

// runtime.cpp
uint64_t random_number();
void run_next();             // lets another lane run, until it is this one's turn again
[[noreturn]] void give_up();  // leaves the launch
__attribute__((format(printf, 1, 2))) void say(const char* format, ...);

// waiting.cpp
void start_block();
void end_lane(Lane&);
[[noreturn]] void deadlock();

// checker.cpp. Without it nothing is watched.
#ifdef SIMT_CHECK
void check_launch(Range shared, Range dynamic_shared);
void check_block();
void check_order(const std::vector<Lane*>& met); // what each did before, all see from here on
void check_end();
#else
inline void check_launch(Range, Range) {}
inline void check_block() {}
inline void check_order(const std::vector<Lane*>&) {}
inline void check_end() {}
#endif

} // namespace simt
