// Running one kernel: between entries.cc, which knows the kernels, and emu.cc, which runs them.
#pragma once
#include <cstddef>

namespace emu {
struct kernel {
    const char *name;
    void (*call)(const void *args); // one thread of it
    bool flat;                      // its threads never meet: no fibers are needed
};
void launch(const kernel &k, const unsigned grid[3], const unsigned block[3], size_t shared, const void *args);
} // namespace emu
