# Tests of the CUDA side without a GPU: the kernel emulator (emu/) and the test double of NVIDIA's libraries (double/).
# Included by the Makefile; needs CUDA's headers and g++, and builds nothing where they are missing.
CUDA_HOME ?= /usr/local/cuda
CUDA_INC := $(firstword $(wildcard $(CUDA_HOME)/include/cuda_runtime_api.h /usr/include/cuda_runtime_api.h))
CD := $(B)/cuda-double
HAVE_CUDA_TESTS := $(and $(CUDA_INC),$(shell command -v $(CXX)),$(filter x86_64,$(shell uname -m)),yes)

# ---- the emulator -------------------------------------------------------------------------------------------------
EMU := tests/cuda/emu
EMU_FLAGS := -std=c++17 -g -fPIC -fvisibility=hidden -Wall -Wextra $(WERROR) -MMD -MP -I$(EMU) -isystem $(dir $(CUDA_INC))
EMU_SAN := $(if $(filter address,$(SAN)),-fsanitize=address)
# Emulated kernels are fast enough to train with: as this machine can, but a product and a sum stay two operations.
EMU_OPT := -O2 -march=native -ffp-contract=off
KERNEL_DEFS := '-DDDP_KERNELS_DEF="kernels.def"' '-DDDP_KERNELS_ARGS="args.h"'
TEST_DEFS := '-DDDP_KERNELS_DEF="test_kernels.def"' '-DDDP_KERNELS_ARGS="test_args.h"'

# emulated OBJECT SOURCE FLAGS: a .cu by g++; its shared variables are its .bss, renamed so that the emulator finds them.
emulated = $(CXX) $(EMU_FLAGS) $(3) -include emu.h -x c++ -c $(2) -o $(1) && objcopy --rename-section .bss=emu_shared $(1)

$(CD)/obj/kernels/%.o: kernels/cuda/%.cu
	@mkdir -p $(@D)
	$(call emulated,$@,$<,$(EMU_OPT) $(EMU_SAN) -Wno-unknown-pragmas -Wno-unused-function -Ikernels/cuda)
$(CD)/obj/emu/%.o: $(EMU)/%.cc
	@mkdir -p $(@D)
	$(CXX) $(EMU_FLAGS) $(EMU_OPT) $(EMU_SAN) -c $< -o $@
$(CD)/obj/emu/entries.o: EMU_OPT += -Ikernels/cuda $(KERNEL_DEFS)
$(CD)/libddp_emulated.so: $(patsubst kernels/cuda/%.cu,$(CD)/obj/kernels/%.o,$(wildcard kernels/cuda/*.cu)) $(CD)/obj/emu/emu.o $(CD)/obj/emu/fiber.o $(CD)/obj/emu/entries.o
	$(CXX) -shared $(if $(EMU_SAN),$(EMU_SAN),-Wl$(comma)-z$(comma)defs) -o $@ $^

# The same, watched for races: LD_PRELOAD=libtsan.so DDP_DOUBLE_KERNELS=.../libddp_emulated_thread.so luajit ...
$(CD)/obj/kernels_thread/%.o: kernels/cuda/%.cu
	@mkdir -p $(@D)
	$(call emulated,$@,$<,-O1 -fsanitize=thread -Wno-unknown-pragmas -Wno-unused-function -Ikernels/cuda)
$(CD)/obj/emu_thread/%.o: $(EMU)/%.cc
	@mkdir -p $(@D)
	$(CXX) $(EMU_FLAGS) -O2 -DEMU_TSAN -Ikernels/cuda $(KERNEL_DEFS) -c $< -o $@
$(CD)/libddp_emulated_thread.so: $(patsubst kernels/cuda/%.cu,$(CD)/obj/kernels_thread/%.o,$(wildcard kernels/cuda/*.cu)) $(patsubst %,$(CD)/obj/emu_thread/%.o,emu fiber entries)
	$(CXX) -shared -fsanitize=thread -o $@ $^

# The emulator's own tests, plain and under each sanitizer. The scheduler is not watched for races: only the kernels are.
define emu_test
$(CD)/$(1)/%.o: $(EMU)/%.cc
	@mkdir -p $$(@D)
	$(CXX) $(EMU_FLAGS) $(TEST_DEFS) $(2) $(if $(findstring thread,$(1)),$$(if $$(filter emu fiber,$$*),-DEMU_TSAN,-fsanitize=thread)) -c $$< -o $$@
$(CD)/$(1)/test_kernels.o: $(EMU)/test_kernels.cu
	@mkdir -p $$(@D)
	$$(call emulated,$$@,$$<,$(2) $(if $(findstring thread,$(1)),-fsanitize=thread))
$(CD)/$(1)/test_emu: $(patsubst %,$(CD)/$(1)/%.o,emu fiber entries test_kernels test_emu)
	$(CXX) $(2) $(if $(findstring thread,$(1)),-fsanitize=thread) -o $$@ $$^
endef
$(eval $(call emu_test,emu_plain,$(EMU_OPT)))
$(eval $(call emu_test,emu_address,-O1 -fsanitize=address))
$(eval $(call emu_test,emu_thread,-O1))

# ---- the double ---------------------------------------------------------------------------------------------------
# Sonames are the toolkit's: the major of its headers.
DOUBLE := tests/cuda/double
CUDA_MAJOR := $(shell sed -nE 's/^.define CUDART_VERSION +([0-9]+)[0-9]{3}$$/\1/p' $(CUDA_INC) /dev/null)
DOUBLE_FLAGS := -std=c11 -D_GNU_SOURCE -O3 -march=native -ffp-contract=off -g -fPIC -fvisibility=hidden -Wall -Wextra $(WERROR) -MMD -MP -I$(CD)/gen -isystem $(dir $(CUDA_INC))
DOUBLE_LINK := $(CC) -shared $(EMU_SAN) $(if $(EMU_SAN),,-Wl$(comma)-z$(comma)defs) -Wl,-z,nodelete -Wl,-rpath,'$$ORIGIN' -L$(CD)
CUDART_SRC := config memory pinned stream graph probe cudart_memory cudart_stream cudart_kernel cudart_device

$(CD)/gen/error_names.h: $(dir $(CUDA_INC))driver_types.h
	@mkdir -p $(@D)
	sed -nE 's/^ +(cuda(Success|Error[A-Za-z0-9]+)) *= *[0-9]+.*/{\1, "\1"},/p' $< > $@
$(CD)/obj/double/%.o: $(DOUBLE)/%.c | $(CD)/gen/error_names.h
	@mkdir -p $(@D)
	$(CC) $(DOUBLE_FLAGS) $(EMU_SAN) -c $< -o $@
$(CD)/libcudart.so.$(CUDA_MAJOR): $(CUDART_SRC:%=$(CD)/obj/double/%.o)
	$(DOUBLE_LINK) -Wl,-soname,$(@F) -o $@ $^ -ldl -lpthread
	@ln -sf $(@F) $(CD)/libcudart.so

CUBLAS_SRC := cublas gemm
CUBLASLT_SRC := cublaslt
NCCL_SRC := nccl nccl_world nccl_call nccl_reduce
define double_lib
$(CD)/lib$(1).so.$(2): $(3:%=$(CD)/obj/double/%.o) $(CD)/libcudart.so.$(CUDA_MAJOR)
	$(DOUBLE_LINK) -Wl,-soname,$$(@F) -o $$@ $$(filter %.o,$$^) -lcudart -lm
	@ln -sf $$(@F) $(CD)/lib$(1).so
endef
$(eval $(call double_lib,cublas,$(CUDA_MAJOR),$(CUBLAS_SRC)))
$(eval $(call double_lib,cublasLt,$(CUDA_MAJOR),$(CUBLASLT_SRC)))
$(eval $(call double_lib,nccl,2,$(NCCL_SRC)))

# NVRTC's compiles with g++, against the emulator's sources and objects.
NVRTC_DEFS := '-DDOUBLE_CXX="$(CXX)"' '-DDOUBLE_EMU="$(abspath $(EMU))"' '-DDOUBLE_EMU_OBJECTS="$(abspath $(CD))/obj/emu"' '-DDOUBLE_CUDA_INCLUDE="$(dir $(CUDA_INC))"'
$(CD)/libnvrtc.so.$(CUDA_MAJOR): $(DOUBLE)/nvrtc.cc $(CD)/libcudart.so.$(CUDA_MAJOR) $(CD)/obj/emu/emu.o $(CD)/obj/emu/fiber.o
	$(CXX) $(EMU_FLAGS) $(EMU_OPT) $(EMU_SAN) $(NVRTC_DEFS) -shared -Wl,-soname,$(@F) -Wl,-rpath,'$$ORIGIN' -o $@ $< -L$(CD) -lcudart
	@ln -sf $(@F) $(CD)/libnvrtc.so

DOUBLE_SO := $(patsubst %,$(CD)/lib%.so.$(CUDA_MAJOR),cudart cublas cublasLt nvrtc) $(CD)/libnccl.so.2

# The double's own tests, on the test kernels of the emulator.
$(CD)/libtest_emulated.so: $(patsubst %,$(CD)/emu_plain/%.o,emu fiber entries test_kernels)
	$(CXX) -shared -o $@ $^
DOUBLE_TESTS := $(patsubst tests/cuda/%.c,$(CD)/%,$(filter-out tests/cuda/test_cudnn%,$(wildcard tests/cuda/test_*.c)))
$(CD)/test_%: tests/cuda/test_%.c tests/cuda/child.h $(DOUBLE_SO) $(CD)/libtest_emulated.so
	$(CC) $(filter-out -MMD -MP,$(DOUBLE_FLAGS)) -O1 $(EMU_SAN) -o $@ $< -L$(CD) -Wl,-rpath,'$$ORIGIN' $(shell sed -nE 's|^/. link: (.*) .*/$$|\1|p' $<) -lcudart -lm -lpthread

CUDA_DOUBLE := $(DOUBLE_TESTS) $(DOUBLE_SO) $(if $(wildcard kernels/cuda/kernels.def),$(CD)/libddp_emulated.so) $(patsubst %,$(CD)/emu_%/test_emu,plain address thread)

cuda-double: $(if $(HAVE_CUDA_TESTS),$(CUDA_DOUBLE)) ## the test double of NVIDIA's libraries, into build/cuda-double
	@$(if $(HAVE_CUDA_TESTS),true,echo "cuda-double: not built: it needs g++ on x86-64 and CUDA's headers (CUDA_HOME=$(CUDA_HOME))")
# What NVIDIA's libraries say of this machine, for scripts/gpu_check.sh.
$(B)/gpu_dump: tests/cuda/gpu_dump.c $(B)/obj/kernels/cuda/api.o $(B)/libddp.so
	$(CC) $(filter-out -MMD -MP,$(CFLAGS_ALL)) $(CUDA_CFLAGS) -o $@ $(filter %.c %.o,$^) -L$(B) -lddp -ldl -lpthread -Wl,-rpath,'$$ORIGIN'
gpu-dump: $(if $(HAVE_CUDA),$(B)/gpu_dump)

cuda-races: $(if $(HAVE_CUDA_TESTS),$(if $(wildcard kernels/cuda/kernels.def),$(CD)/libddp_emulated_thread.so)) ## the kernels for ThreadSanitizer (tests/cuda/races.sh)
test-cuda: all cuda-double cuda-races gpu-dump ## the tests of the CUDA side, on the double: no GPU is needed
	tests/run.sh $(B) cuda
.PHONY: cuda-double cuda-races test-cuda gpu-dump
