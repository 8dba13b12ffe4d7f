// Stacks that one thread switches between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace simt {

#if defined(__x86_64__)

struct Fiber {
    void* stack_pointer = nullptr;
};

extern "C" void simt_switch(void** from, void* to);
// Keeps what the System V ABI says a call keeps (rounding modes apart, which nothing here changes).
asm(R"(.text
.hidden simt_switch
.weak simt_switch
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp,(%rdi)
    movq %rsi,%rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch,.-simt_switch)");

inline void start(Fiber& fiber, char* stack, size_t bytes, void (*entry)())
{
    auto top = reinterpret_cast<uintptr_t*>(stack + bytes);
    top[-1] = 0; // the entry's return address, which also aligns the stack as a call does
    top[-2] = reinterpret_cast<uintptr_t>(entry);
    memset(top - 8, 0, 6 * sizeof *top); // the registers
    fiber.stack_pointer = top - 8;
}
inline void change(Fiber& from, Fiber& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }

#else
} // namespace simt
#include <ucontext.h>
namespace simt {

struct Fiber {
    ucontext_t context;
};
inline void start(Fiber& fiber, char* stack, size_t bytes, void (*entry)())
{
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}
inline void change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

} // namespace simt
