// Fibers: each lane of a block has a stack of its own; the scheduler enters one, and it comes back at the next
// barrier, warp operation or at its end. x86-64 only. AddressSanitizer and ThreadSanitizer are told of each switch.
#pragma once
#include <cstddef>

struct fiber {
    void *sp;    // where its registers were saved
    char *stack; // lowest address; kept between blocks
    char *top;   // where it begins: not the same place of a page for all, or they would share few lines of the cache
    void *asan;  // AddressSanitizer's fake stack while it does not run
    void *tsan;  // ThreadSanitizer's fiber
};

void fiber_create(fiber *f);                      // makes the stack
void fiber_prepare(fiber *f, void (*entry)());    // it will start at entry, which never returns but leaves for ever
void fiber_arrived();                             // first statement of an entry
void fiber_enter(fiber *f);                       // the scheduler runs f until it leaves
void fiber_leave(fiber *f, bool for_ever);        // f goes back to the scheduler
void fiber_release(void *token);                  // what this thread or lane wrote so far ...
void fiber_acquire(void *token);                  // ... is ordered before what comes after this, for ThreadSanitizer
bool fiber_is_poisoned(const void *at, size_t n); // AddressSanitizer forbids these bytes (between two arrays)
