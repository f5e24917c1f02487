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

CUDA_DOUBLE := $(if $(wildcard kernels/cuda/kernels.def),$(CD)/libddp_emulated.so) $(patsubst %,$(CD)/emu_%/test_emu,plain address thread)

cuda-double: $(if $(HAVE_CUDA_TESTS),$(CUDA_DOUBLE)) ## the test double of NVIDIA's libraries, into build/cuda-double
	@$(if $(HAVE_CUDA_TESTS),true,echo "cuda-double: not built: it needs g++ on x86-64 and CUDA's headers (CUDA_HOME=$(CUDA_HOME))")
test-cuda: cuda-double ## the tests of the CUDA side, on the double: no GPU is needed
	tests/run.sh $(B) cuda
.PHONY: cuda-double test-cuda
