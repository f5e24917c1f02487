// What the test double of cudart calls: for each kernel of the list its emulated launch and the size of its argument
// struct. DDP_KERNELS_DEF and DDP_KERNELS_ARGS are the headers with the list and the structs.
#include "launch.h"
#include DDP_KERNELS_ARGS

#define FLAT 1
#define MEET 0
#define FAMILY(f)
#define KERNEL(name, args_struct, flags)                                                    \
    extern "C" void name(args_struct args);                                                 \
    static void call_##name(const void *args) { name(*(const args_struct *)args); }         \
    static const emu::kernel kernel_##name = {#name, call_##name, (flags) == FLAT};         \
    extern "C" __attribute__((visibility("default"))) const size_t ddp_emu_size_##name;     \
    const size_t ddp_emu_size_##name = sizeof(args_struct);                                 \
    extern "C" __attribute__((visibility("default"))) void ddp_emu_##name(                  \
        const unsigned grid[3], const unsigned block[3], size_t shared, const void *args) { \
        emu::launch(kernel_##name, grid, block, shared, args);                              \
    }
#define KERNEL_FLOATS(name, args_struct, flags) \
    KERNEL(name##_f32, args_struct, flags)      \
    KERNEL(name##_f64, args_struct, flags)      \
    KERNEL(name##_f16, args_struct, flags)      \
    KERNEL(name##_bf16, args_struct, flags)
#define KERNEL_ALL(name, args_struct, flags) \
    KERNEL_FLOATS(name, args_struct, flags)  \
    KERNEL(name##_i64, args_struct, flags)   \
    KERNEL(name##_i32, args_struct, flags)   \
    KERNEL(name##_u8, args_struct, flags)    \
    KERNEL(name##_bool, args_struct, flags)
#include DDP_KERNELS_DEF
