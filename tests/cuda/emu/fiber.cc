#include "fiber.h"
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

// EMU_TSAN: the kernels are compiled with -fsanitize=thread, this file is not (its own writes are no race).
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
static const size_t stack_size = 256 << 10;
#else
static const size_t stack_size = 64 << 10;
#endif
#ifdef EMU_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void *, unsigned);
void __tsan_acquire(void *);
void __tsan_release(void *);
}
static const unsigned no_order = 1; // a switch alone orders nothing: only barriers and warp operations do
#endif
#ifndef __x86_64__
#error "the emulator's fibers are written for x86-64"
#endif

static const size_t guard_size = 4096;

static struct {
    void *sp, *asan, *tsan;
    const void *stack;
    size_t stack_size;
} scheduler;

// Saves the callee-saved registers on this stack, keeps its top in *save, and goes on where `to` was saved.
extern "C" void emu_switch(void **save, void *to) __attribute__((visibility("hidden")));
asm(R"(.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
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
.size emu_switch,.-emu_switch
)");

void fiber_create(fiber *f) {
    static size_t made;
    void *at = mmap(nullptr, stack_size + guard_size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || mprotect(at, guard_size, PROT_NONE)) {
        perror("emulator: the stack of a lane");
        _Exit(99);
    }
    f->stack = (char *)at + guard_size;
    f->top = f->stack + stack_size - 64 * (1 + made++ % 61);
#ifdef EMU_TSAN
    f->tsan = __tsan_create_fiber(0);
#endif
}

void fiber_prepare(fiber *f, void (*entry)()) {
    void **top = (void **)f->top;
    *--top = nullptr;       // entry's return address: it has none; the stack is 16-byte aligned as after a call
    *--top = (void *)entry; // where emu_switch returns to
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f->sp = top;
    f->asan = nullptr;
}

void fiber_arrived() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_size);
#endif
}

void fiber_enter(fiber *f) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&scheduler.asan, f->stack, stack_size);
#endif
#ifdef EMU_TSAN
    scheduler.tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(f->tsan, no_order);
#endif
    emu_switch(&scheduler.sp, f->sp);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(scheduler.asan, nullptr, nullptr);
#endif
}

void fiber_leave(fiber *f, bool for_ever) {
    (void)for_ever;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &f->asan, scheduler.stack, scheduler.stack_size);
#endif
#ifdef EMU_TSAN
    __tsan_switch_to_fiber(scheduler.tsan, no_order);
#endif
    emu_switch(&f->sp, scheduler.sp);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(f->asan, &scheduler.stack, &scheduler.stack_size);
#endif
}

#ifdef EMU_TSAN
void fiber_release(void *token) { __tsan_release(token); }
void fiber_acquire(void *token) { __tsan_acquire(token); }
#else
void fiber_release(void *) {}
void fiber_acquire(void *) {}
#endif

bool fiber_is_poisoned(const void *at, size_t n) {
#ifdef __SANITIZE_ADDRESS__
    return __asan_region_is_poisoned((void *)at, n) != nullptr;
#else
    (void)at, (void)n;
    return false;
#endif
}
