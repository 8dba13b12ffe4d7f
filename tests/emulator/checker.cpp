// Watches every memory access of a kernel, and integer arithmetic.
//
// The kernel is compiled with -fsanitize=thread,undefined, but linked with the hooks at the end of this file instead of
// the sanitizers' own libraries, so that it runs inside an ordinary process.
#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <memory>
#include <unordered_map>

#include "runtime.h"

namespace simt {
namespace {

constexpr size_t MOST_FINDINGS = 20;
constexpr size_t NEAR = 4096; // bytes from a memory that still count as running over its end

struct Touch { // an access to a byte
    uint32_t block; // its number + 1; 0 for none
    uint32_t clock; // of the lane
    uint32_t code;  // where in the module's image
    uint16_t lane;
    bool atomic;
};

struct Shadow { // of a byte
    Touch write;
    Touch reads[2]; // the last ones of different lanes
};

struct Memory {
    uintptr_t start, end;
    uint8_t* initialised; // null if all of it is
    bool read_only;
    std::string name;
    std::unique_ptr<Shadow, void (*)(void*)> shadow;
    std::vector<uint8_t> own; // what `initialised` points to, for shared memory
};

std::vector<Memory> memories;
std::vector<uint32_t> clocks;   // [threads, threads]: up to when each thread of the block has seen each other
std::vector<uint8_t> acquired;  // of each block: may this block see what that one wrote
std::unordered_map<uintptr_t, std::vector<unsigned>> released; // atomic's address -> blocks that had fenced before it
std::unordered_map<uint64_t, bool> reported;
uintptr_t image_start, image_end;
uint64_t accesses;

void add_memory(uintptr_t start, size_t bytes, uint8_t* initialised, bool read_only, const char* name)
{
    // calloc, because most of a large array's shadow is never touched
    auto shadow = static_cast<Shadow*>(calloc(std::max<size_t>(bytes, 1), sizeof(Shadow)));
    memories.push_back({start, start + bytes, initialised, read_only, name, {shadow, free}, {}});
}

void add_shared(Range range, const char* name)
{
    if (range.end <= range.start)
        return;
    const size_t bytes = range.end - range.start;
    add_memory(reinterpret_cast<uintptr_t>(range.start), bytes, nullptr, false, name);
    memories.back().own.resize(bytes);
    memories.back().initialised = memories.back().own.data();
}

void find_image()
{
    image_start = image_end = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void*) {
            const uintptr_t here = reinterpret_cast<uintptr_t>(&find_image);
            uintptr_t end = info->dlpi_addr;
            bool found = false;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                if (info->dlpi_phdr[i].p_type != PT_LOAD)
                    continue;
                const uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
                end = start + info->dlpi_phdr[i].p_memsz;
                found = found || (here >= start && here < end);
            }
            if (found) {
                image_start = info->dlpi_addr;
                image_end = end;
            }
            return static_cast<int>(found);
        },
        nullptr);
}

// Whether this is new and there is room for it.
bool worth_saying(uint64_t key)
{
    return reported.size() < MOST_FINDINGS && reported.emplace(key, true).second;
}

// "@pc=" is turned into a line by host_cuda.py.
void found(const char* what, const Memory* memory, uintptr_t address, uint32_t code, const Touch* earlier = nullptr)
{
    if (!worth_saying((uint64_t(code) << 32 | (earlier ? earlier->code : 0)) ^ std::hash<std::string>()(what)))
        return;
    char before[100] = "";
    if (earlier)
        snprintf(before, sizeof before, "; earlier by block %u thread %u @pc=%#x", earlier->block - 1, earlier->lane,
                 earlier->code);
    char place[100];
    if (memory)
        snprintf(place, sizeof place, "%.60s%+td", memory->name.c_str(), ptrdiff_t(address - memory->start));
    else
        snprintf(place, sizeof place, "address %#llx", static_cast<unsigned long long>(address));
    say("%s: %s by block %u thread %u @pc=%#x%s", what, place, block_number, running()->number, code, before);
}

[[noreturn]] void found_fatal(const char* what, const Memory* memory, uintptr_t address, uint32_t code)
{
    found(what, memory, address, code);
    give_up();
}

Memory* find(uintptr_t address)
{
    for (Memory& memory : memories)
        if (address >= memory.start && address < memory.end)
            return &memory;
    return nullptr;
}

// Outside of all memories: said of the one that is nearest.
[[noreturn]] void found_outside(uintptr_t address, uint32_t code)
{
    const Memory* nearest = nullptr;
    size_t least = NEAR;
    for (const Memory& memory : memories) {
        const size_t distance = address >= memory.end ? address - memory.end : memory.start - address;
        if (distance < least) {
            least = distance;
            nearest = &memory;
        }
    }
    if (!nearest)
        found_fatal("error: out of bounds (of everything)", nullptr, address, code);
    if (address >= nearest->end)
        found_fatal("error: out of bounds (past the end)", nearest, address, code);
    found_fatal("error: out of bounds (before the start)", nearest, address, code);
}

// Whether the running lane sees what an earlier access did.
bool ordered(const Touch& earlier)
{
    if (earlier.block != block_number + 1)
        return acquired[earlier.block - 1];
    return earlier.lane == running()->number ||
           earlier.clock <= clocks[size_t(running()->number) * threads + earlier.lane];
}

void access_byte(Memory& memory, uintptr_t address, const Touch& touch, bool write)
{
    Shadow& shadow = memory.shadow.get()[address - memory.start];
    uint8_t* initialised = memory.initialised ? memory.initialised + (address - memory.start) : nullptr;
    const auto races = [&](const Touch& earlier) {
        return earlier.block && !ordered(earlier) && !(touch.atomic && earlier.atomic);
    };
    if (races(shadow.write))
        found(write ? "race: write after write" : "race: read after write", &memory, address, touch.code,
              &shadow.write);
    if (!write) {
        if (initialised && !*initialised)
            found("uninitialised read", &memory, address, touch.code);
        if (shadow.reads[0].block != touch.block || shadow.reads[0].lane != touch.lane)
            shadow.reads[1] = shadow.reads[0];
        shadow.reads[0] = touch;
        return;
    }
    for (const Touch& read : shadow.reads)
        if (races(read))
            found("race: write after read", &memory, address, touch.code, &read);
    if (initialised)
        *initialised = 1;
    shadow = {touch, {}};
}

void access(const volatile void* pointer, size_t bytes, bool write, bool atomic, void* code_address)
{
    Lane* lane = running();
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (!lane || address - reinterpret_cast<uintptr_t>(lane->stack) < STACK_BYTES ||
        address - reinterpret_cast<uintptr_t>(lanes.data()) < lanes.size() * sizeof(Lane))
        return; // its own variables, threadIdx
    const uint32_t code = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code_address) - image_start);
    if (++accesses > launch->most_accesses)
        found_fatal("error: too many accesses (an endless loop?)", nullptr, address, code);
    if (launch->preempt && !launch->independent && random_number() % launch->preempt == 0)
        run_next();
    Memory* memory = find(address);
    if (!memory) {
        if (!write && address >= image_start && address + bytes <= image_end)
            return; // constants of the module
        found_outside(address, code);
    }
    if (address + bytes > memory->end)
        found_fatal("error: out of bounds (over the end)", memory, address, code);
    if (bytes <= 16 && address % bytes)
        found_fatal("error: misaligned access", memory, address, code);
    if (write && memory->read_only)
        found("error: write to a const argument", memory, address, code);
    const uint32_t clock = clocks[size_t(lane->number) * threads + lane->number];
    const Touch touch = {block_number + 1, clock, code, static_cast<uint16_t>(lane->number), atomic};
    for (size_t i = 0; i < bytes; ++i)
        access_byte(*memory, address + i, touch, write);
}

// __threadfence and an atomic release what the block wrote, to a block that does an atomic there afterwards.
void atomic_access(const volatile void* pointer, size_t bytes, bool write, void* code_address)
{
    access(pointer, bytes, write, true, code_address);
    if (!running())
        return;
    std::vector<unsigned>& blocks = released[reinterpret_cast<uintptr_t>(pointer)];
    for (unsigned block : blocks)
        acquired[block] = 1;
    if (running()->fenced && (blocks.empty() || blocks.back() != block_number))
        blocks.push_back(block_number);
}

template <class Word> int compare_exchange(volatile Word* address, Word* expected, Word value, void* code_address)
{
    atomic_access(address, sizeof(Word), true, code_address);
    if (*address == *expected) {
        *address = value;
        return 1;
    }
    *expected = *address;
    return 0;
}

struct UndefinedBehaviour { // begins what the compiler tells of a place
    const char* file;
    uint32_t line, column;
};

void found_undefined(const char* what, const UndefinedBehaviour* place)
{
    if (running() && worth_saying(uint64_t(place->line) << 32 | place->column))
        say("undefined behaviour: %s by block %u thread %u line %u", what, block_number, running()->number,
            place->line);
}

} // namespace

void check_launch(Range shared, Range dynamic_shared)
{
    find_image();
    memories.clear();
    for (size_t i = 0; i < launch->region_count; ++i) {
        const Region& region = launch->regions[i];
        add_memory(reinterpret_cast<uintptr_t>(region.start), region.bytes, region.initialised, region.read_only,
                   region.name);
    }
    add_shared(shared, "__shared__");
    add_shared(dynamic_shared, "dynamic __shared__");
    acquired.assign(size_t(launch->grid[0]) * launch->grid[1] * launch->grid[2], 0);
    clocks.assign(size_t(threads) * threads, 0);
    released.clear();
    reported.clear();
    accesses = 0;
}

void check_block()
{
    if (!launch->independent)
        std::fill(clocks.begin(), clocks.end(), 0);
    for (unsigned i = 0; i < threads; ++i)
        clocks[size_t(i) * threads + i] = 1;
    if (!released.empty())
        std::fill(acquired.begin(), acquired.end(), 0);
    for (Memory& memory : memories) { // shared memory is new in each block
        std::fill(memory.own.begin(), memory.own.end(), 0);
        memset(memory.shadow.get(), 0, memory.own.size() * sizeof(Shadow));
    }
}

void check_order(const std::vector<Lane*>& met)
{
    static std::vector<uint32_t> latest;
    latest.assign(threads, 0);
    for (const Lane* lane : met)
        for (unsigned i = 0; i < threads; ++i)
            latest[i] = std::max(latest[i], clocks[size_t(lane->number) * threads + i]);
    for (const Lane* lane : met) {
        uint32_t* own = &clocks[size_t(lane->number) * threads];
        std::copy(latest.begin(), latest.end(), own);
        ++own[lane->number];
    }
}

void check_end() { memories.clear(); }

} // namespace simt

// ---------------------------------------------------------------- what the compiler makes an instrumented kernel call
#define CODE __builtin_return_address(0)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, long bytes) { simt::access(p, bytes, false, false, CODE); }
void __tsan_write_range(void* p, long bytes) { simt::access(p, bytes, true, false, CODE); }

#define ACCESSES(bytes)                                                                                                \
    void __tsan_read##bytes(void* p) { simt::access(p, bytes, false, false, CODE); }                                   \
    void __tsan_write##bytes(void* p) { simt::access(p, bytes, true, false, CODE); }                                   \
    void __tsan_unaligned_read##bytes(void* p) { simt::access(p, bytes, false, false, CODE); }                         \
    void __tsan_unaligned_write##bytes(void* p) { simt::access(p, bytes, true, false, CODE); }                         \
    void __tsan_volatile_read##bytes(void* p) { simt::access(p, bytes, false, false, CODE); }                          \
    void __tsan_volatile_write##bytes(void* p) { simt::access(p, bytes, true, false, CODE); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

#define ATOMICS(bits)                                                                                                  \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* p, int)                                   \
    {                                                                                                                  \
        simt::atomic_access(p, bits / 8, false, CODE);                                                                 \
        return *p;                                                                                                     \
    }                                                                                                                  \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t* p, uint##bits##_t* expected,            \
                                                      uint##bits##_t value, int, int)                                  \
    {                                                                                                                  \
        return simt::compare_exchange(p, expected, value, CODE);                                                       \
    }
ATOMICS(32)
ATOMICS(64)

#define UNDEFINED(name, what)                                                                                          \
    void __ubsan_handle_##name(const simt::UndefinedBehaviour* place) { simt::found_undefined(what, place); }
UNDEFINED(type_mismatch_v1, "a null or misaligned pointer, or one to too small an object")
UNDEFINED(add_overflow, "a signed sum overflows")
UNDEFINED(sub_overflow, "a signed difference overflows")
UNDEFINED(mul_overflow, "a signed product overflows")
UNDEFINED(negate_overflow, "a negation overflows")
UNDEFINED(divrem_overflow, "a division by zero, or one that overflows")
UNDEFINED(shift_out_of_bounds, "a shift by too much, or of a negative number")
UNDEFINED(out_of_bounds, "an index outside of its array")
UNDEFINED(load_invalid_value, "a bool that is neither true nor false")
UNDEFINED(pointer_overflow, "a pointer overflows")
UNDEFINED(builtin_unreachable, "an unreachable place was reached")
UNDEFINED(float_cast_overflow, "a float that the integer type cannot hold")
UNDEFINED(invalid_builtin, "zero given to a count of leading or trailing zeros")
UNDEFINED(missing_return, "a function ends without returning its value")
UNDEFINED(nonnull_arg, "a null pointer where none may be")
UNDEFINED(vla_bound_not_positive, "an array of no elements")

} // extern "C"
