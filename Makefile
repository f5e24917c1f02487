# Builds ddp. `make help` lists the targets.
SHELL := /bin/bash
PREFIX ?= /usr/local
DESTDIR ?=
SAN ?=
B := build$(if $(SAN),-$(SAN))
CC := gcc
CXX := g++
LUAJIT := luajit
OPT ?= -O3
WERROR ?= $(if $(CI),-Werror)

CFLAGS_ALL := -std=c11 -D_GNU_SOURCE $(OPT) -g -fPIC -fvisibility=hidden -fopenmp -Wall -Wextra -Wshadow=local -MMD -MP $(WERROR) -Icore -I$(B)/gen
LDFLAGS_ALL := -Wl,-z,nodelete,-z,defs -fopenmp
ifeq ($(SAN),address)
CFLAGS_ALL += -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -DDDP_SAN
LDFLAGS_ALL := -Wl,-z,nodelete -fopenmp -fsanitize=address,undefined
OPT := -O1
endif
LUA_CFLAGS := $(shell pkg-config --cflags luajit 2>/dev/null)
LUA_LIBS := $(shell pkg-config --libs luajit 2>/dev/null)
HAVE_DNNL := $(shell test -e /usr/include/dnnl.h -o -e /usr/include/oneapi/dnnl/dnnl.h && echo yes)

# Engines across hosts, each built when its library's headers are there.
HAVE_GLOO := $(shell test -e /usr/include/gloo/context.h && command -v $(CXX) >/dev/null && echo yes)
OMPI_FLAGS := $(shell pkg-config --cflags --libs ompi-c 2>/dev/null)
MPICH_FLAGS := $(shell pkg-config --cflags --libs mpich 2>/dev/null)
MPIS := $(if $(OMPI_FLAGS),openmpi) $(if $(MPICH_FLAGS),mpich)

# GPUs: built where the CUDA toolkit is (nvcc, and the headers of cuDNN and NCCL). Nothing of NVIDIA's is linked.
NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
HAVE_CUDA := $(if $(NVCC),$(shell echo '\#include <cudnn.h>' | cat - <(echo '\#include <nccl.h>') | $(CC) -E -I$(CUDA_HOME)/include -x c - >/dev/null 2>&1 && echo yes))
CUDA_ARCHS ?= 75 80 86 89 90 100 120
CUDA_MAJOR := $(if $(HAVE_CUDA),$(shell sed -n 's/^\#define CUDART_VERSION *\([0-9]*\)[0-9]\{3\}.*/\1/p' $(CUDA_HOME)/include/cuda_runtime_api.h))
CUDA_CFLAGS := -isystem $(CUDA_HOME)/include -DDDP_CUDA_MAJOR=$(CUDA_MAJOR) -DDDP_CUDA_ARCHS='"$(CUDA_ARCHS)"' -DDDP_CUDA_OLDEST=$(firstword $(CUDA_ARCHS)) -DDDP_CUDA_HOME_LIBS='"$(CUDA_HOME)/lib64"'
NVCC_FLAGS := -std=c++17 -O3 --compress-mode=size -Wno-deprecated-gpu-targets -diag-suppress 186 $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(lastword $(CUDA_ARCHS)),code=compute_$(lastword $(CUDA_ARCHS)) -Xptxas --warn-on-spills,--warn-on-local-memory-usage,-Werror
CUDA_SRC := $(wildcard kernels/cuda/*.c kernels/cudnn/*.c kernels/cublas/*.c kernels/nccl/*.c)
CUDA_OBJ := $(CUDA_SRC:%.c=$(B)/obj/%.o)
# The images do not depend on the sanitizer: they lie in build/.
CUDA_IMAGES := $(patsubst kernels/cuda/%.cu,build/cuda/%.o,$(wildcard kernels/cuda/*.cu))

CORE_SRC := $(wildcard core/base/*.c core/tensor/*.c core/mem/*.c core/op/*.c core/ops/*.c core/grad/*.c core/amp/*.c core/comm/*.c core/data/*.c core/io/*.c) $(wildcard kernels/ref/*.c)
CPU_SRC := $(filter-out kernels/cpu/list.c,$(wildcard kernels/cpu/*.c))
ISAS := v2 v3 v4
CORE_OBJ := $(CORE_SRC:%.c=$(B)/obj/%.o) $(B)/obj/ops_table.o $(foreach i,$(ISAS),$(CPU_SRC:kernels/cpu/%.c=$(B)/obj/cpu-$(i)/%.o)) $(B)/obj/kernels/cpu/list.o
HOST_OBJ := $(patsubst %.c,$(B)/obj/%.o,$(wildcard core/host/*.c))
RUN_OBJ := $(patsubst %.c,$(B)/obj/%.o,$(wildcard core/launch/*.c) core/comm/store.c core/comm/store_client.c core/comm/environment.c core/comm/flight_read.c core/comm/signature.c core/tensor/dtype.c core/base/error.c core/base/log.c core/base/threads.c core/base/phase.c)
DNNL_OBJ := $(patsubst %.c,$(B)/obj/%.o,$(wildcard kernels/onednn/*.c))
GEN := $(B)/gen/ddp_ops.h $(B)/gen/op_attrs.h $(B)/gen/ops_table.c $(B)/lua/ddp/ops_sig.lua
LIBS := $(B)/libddp.so $(B)/libddp_host.so $(if $(HAVE_DNNL),$(B)/libddp_onednn.so) $(if $(HAVE_GLOO),$(B)/libddp_gloo.so) $(MPIS:%=$(B)/libddp_%.so) $(if $(HAVE_CUDA),$(B)/libddp_cuda.so) $(B)/ddprun

all: deps-check $(LIBS) $(B)/lua/ddp/cdef.lua $(B)/pkgconfig/ddp.pc ## build everything into build/
	@echo "ddp: $$($(LUAJIT) -v | cut -d' ' -f1-2) onednn $(if $(HAVE_DNNL),$$(pkg-config --modversion dnnl 2>/dev/null || echo yes),no (libdnnl-dev is missing)) gloo $(if $(HAVE_GLOO),yes,no) mpi $(if $(strip $(MPIS)),$(strip $(MPIS)),no) cuda $(if $(HAVE_CUDA),$(CUDA_MAJOR) for $(CUDA_ARCHS),no (nvcc, cudnn.h or nccl.h is missing))"

# ---- packages ------------------------------------------------------------------------------------------------
deps-check:
	@vendor/need.sh build
deps: ## install what building and testing needs (Debian, as root)
	@vendor/need.sh --install build comm test lint

# ---- what follows from ops.def -----------------------------------------------------------------------------------
$(GEN) &: core/op/ops.def scripts/tools/gen_ops.lua
	@mkdir -p $(B)/gen/lua/ddp $(B)/lua/ddp
	$(LUAJIT) scripts/tools/gen_ops.lua core/op/ops.def $(B)/gen
	@mv $(B)/gen/lua/ddp/ops_sig.lua $(B)/lua/ddp/ops_sig.lua

$(B)/lua/ddp/cdef.lua: core/ddp.h core/ddp_data.h core/ddp_device.h core/ddp_file.h $(B)/gen/ddp_ops.h
	@mkdir -p $(@D)
	(echo 'return [['; cat core/ddp.h core/ddp_data.h core/ddp_device.h core/ddp_file.h $(B)/gen/ddp_ops.h | grep -v '^#include' | $(CC) -E -P -DDDP_CDEF -x c - ; echo ']]') > $@

# ---- compiling ------------------------------------------------------------------------------------------------------
$(B)/obj/core/host/%.o: CFLAGS_ALL += $(LUA_CFLAGS)
$(B)/obj/%.o: %.c | $(GEN)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -c $< -o $@
$(B)/obj/ops_table.o: $(B)/gen/ops_table.c | $(GEN)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -c $< -o $@
define isa_rule
$(B)/obj/cpu-$(1)/%.o: kernels/cpu/%.c | $(GEN)
	@mkdir -p $$(@D)
	$(CC) $(CFLAGS_ALL) -march=x86-64-$(1) $(if $(filter v4,$(1)),-mprefer-vector-width=512) -DDDP_CPU_ISA=$(1) -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$(i))))

$(B)/libddp.so: $(CORE_OBJ)
	$(CC) -shared -Wl,-soname,libddp.so $(LDFLAGS_ALL) -o $@ $^ -lmvec -lm -ldl -lpthread
$(B)/libddp_onednn.so: $(DNNL_OBJ) $(B)/libddp.so
	$(CC) -shared $(LDFLAGS_ALL) -o $@ $(DNNL_OBJ) -L$(B) -lddp -ldnnl -lm -Wl,-rpath,'$$ORIGIN'
$(CUDA_OBJ): CFLAGS_ALL += $(CUDA_CFLAGS)
build/cuda/%.fatbin: kernels/cuda/%.cu $(wildcard kernels/cuda/*.cuh) kernels/cuda/args.h kernels/elementwise.def
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -fatbin $< -o $@
# The image as bytes of the library, under a name of its own.
build/cuda/%.o: build/cuda/%.fatbin
	printf '.section .rodata\n.balign 64\n.globl ddp__image_$*\n.hidden ddp__image_$*\nddp__image_$*:\n.incbin "$<"\n.section .note.GNU-stack,"",@progbits\n' | $(CC) -c -x assembler - -o $@
# What generated kernels include, as text that ends with a 0.
CUDA_TEXTS := device:kernels/cuda/device.cuh scalar:kernels/cuda/scalar.cuh args:kernels/cuda/args.h elementwise:kernels/elementwise.def
$(B)/cuda/texts.o: kernels/cuda/device.cuh kernels/cuda/scalar.cuh kernels/cuda/args.h kernels/elementwise.def
	@mkdir -p $(@D)
	(echo '.section .rodata'; $(foreach t,$(CUDA_TEXTS),echo '.globl ddp__text_$(firstword $(subst :, ,$(t)))'; echo '.hidden ddp__text_$(firstword $(subst :, ,$(t)))'; echo 'ddp__text_$(firstword $(subst :, ,$(t))):'; echo '.incbin "$(lastword $(subst :, ,$(t)))"'; echo '.byte 0';) echo '.section .note.GNU-stack,"",@progbits') | $(CC) -c -x assembler - -o $@
$(B)/libddp_cuda.so: $(CUDA_OBJ) $(CUDA_IMAGES) $(B)/cuda/texts.o $(B)/libddp.so
	$(CC) -shared $(LDFLAGS_ALL) -o $@ $(CUDA_OBJ) $(CUDA_IMAGES) $(B)/cuda/texts.o -L$(B) -lddp -lm -ldl -lpthread -Wl,-rpath,'$$ORIGIN'
$(B)/libddp_gloo.so: kernels/gloo/gloo.cc $(wildcard core/comm/*.h) $(B)/libddp.so
	$(CXX) $(subst -std=c11,-std=c++17,$(filter-out -MMD -MP,$(CFLAGS_ALL))) -shared $(LDFLAGS_ALL) -o $@ $< -L$(B) -lddp -lgloo -lpthread -Wl,-rpath,'$$ORIGIN'
$(B)/libddp_openmpi.so $(B)/libddp_mpich.so: kernels/mpi/mpi.c kernels/mpi/pmi.c $(wildcard core/comm/*.h kernels/mpi/*.h) $(B)/libddp.so
	$(CC) $(filter-out -MMD -MP,$(CFLAGS_ALL)) -shared $(LDFLAGS_ALL) -o $@ $(filter %.c,$^) -L$(B) -lddp $(if $(findstring openmpi,$@),$(OMPI_FLAGS),$(MPICH_FLAGS)) -lpthread -Wl,-rpath,'$$ORIGIN'
$(B)/libddp_host.so: $(HOST_OBJ) $(B)/libddp.so
	$(CC) -shared -Wl,-soname,libddp_host.so $(LDFLAGS_ALL) -o $@ $(HOST_OBJ) -L$(B) -lddp $(LUA_LIBS) -lpthread -Wl,-rpath,'$$ORIGIN'
$(B)/ddprun: $(RUN_OBJ)
	$(CC) $(filter-out -fopenmp -Wl$(comma)-z%,$(LDFLAGS_ALL)) -o $@ $^ -ldl -lpthread
comma := ,

# For programs built against the tree (scripts/embed): headers from core and the generated ones.
$(B)/pkgconfig/ddp.pc: vendor/ddp.pc.in vendor/ddp-host.pc.in
	@mkdir -p $(@D)
	for p in ddp ddp-host; do sed -e 's|@PREFIX@|$(CURDIR)|' -e 's|^libdir=.*|libdir=$(CURDIR)/$(B)|' -e 's|^includedir=.*|includedir=$(CURDIR)/core -I$(CURDIR)/$(B)/gen|' vendor/$$p.pc.in > $(@D)/$$p.pc; done

include tests/cuda/cuda.mk tests/cuda/cudnn.mk

# ---- using -------------------------------------------------------------------------------------------------------------
demo: ## install what is missing, build, train ResNet-20 on digits on two ranks
	@vendor/need.sh --install build
	@$(MAKE) --no-print-directory all
	$(B)/ddprun -n 2 scripts/train_resnet.lua

install: all ## install into PREFIX (default /usr/local)
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/share/ddp/lua $(DESTDIR)$(PREFIX)/share/ddp/scripts
	install $(B)/ddprun $(DESTDIR)$(PREFIX)/bin/
	for l in $(notdir $(filter %.so,$(LIBS))); do install $(B)/$$l $(DESTDIR)$(PREFIX)/lib/; done
	install -m 644 core/ddp.h core/ddp_host.h core/ddp_data.h core/ddp_device.h core/ddp_file.h $(B)/gen/ddp_ops.h $(DESTDIR)$(PREFIX)/include/
	cp -r lua/ddp $(DESTDIR)$(PREFIX)/share/ddp/lua/
	install -m 644 $(B)/lua/ddp/*.lua $(DESTDIR)$(PREFIX)/share/ddp/lua/ddp/
	install -m 644 scripts/*.lua $(DESTDIR)$(PREFIX)/share/ddp/scripts/
	install scripts/*.sh $(DESTDIR)$(PREFIX)/share/ddp/scripts/
	cp -r scripts/data scripts/embed $(DESTDIR)$(PREFIX)/share/ddp/scripts/
	for p in ddp ddp-host; do sed 's|@PREFIX@|$(PREFIX)|' vendor/$$p.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/$$p.pc; done

# ---- checking --------------------------------------------------------------------------------------------------------------
test: ## install what is missing, build, run every test
	@vendor/need.sh --install build test
	@$(MAKE) --no-print-directory all cuda-double cuda-races gpu-dump
	tests/run.sh $(B)

test-san: ## the C and Lua tests under AddressSanitizer and UBSan
	@vendor/need.sh --install build test
	@$(MAKE) --no-print-directory all SAN=address
	tests/run.sh build-address c ops lua

check: all ## the rules of the house: includes, sizes, exports, ops
	scripts/tools/check.sh $(B)

lint: all ## clang-format, clang-tidy, luacheck
	@vendor/need.sh --install lint
	CUDA_CFLAGS=$(if $(HAVE_CUDA),$$'$(subst ','\'',$(CUDA_CFLAGS))') scripts/tools/lint.sh $(B)

format: ## clang-format all C in place
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cc')

bench: all $(B)/peak ## speed beside PyTorch's, where a torch is installed (PYTHON=... WHAT=table|conv|memory|steps|comm|link|all BENCH_ARGS=...)
	tests/bench/run.sh $(B) $(WHAT)

roofline: all $(if $(DEVICE),cuda-double,$(B)/peak) ## one training step by kernel and shape, beside this machine's limits, or with DEVICE=h200|a100|l40s|rtx3090 on paper for that GPU (ARGS="--batch 32 --amp bf16")
ifeq ($(DEVICE),)
	OMP_NUM_THREADS=1 $(B)/ddprun tests/bench/roofline.lua --peak $(B)/peak $(ARGS)
else
	eval "$$($(B)/ddprun --env)"; $(LUAJIT) tests/bench/roofline_gpu.lua --device $(DEVICE) --double $(B)/cuda-double $(ARGS)
endif

$(B)/peak: tests/bench/peak.c
	$(CC) -O2 -Wall -Wextra $(WERROR) $< -o $@

clean: ## remove what was built
	rm -rf build build-address

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.PHONY: all deps deps-check demo install test test-san check lint format bench roofline clean help
.SECONDARY: $(CUDA_IMAGES:.o=.fatbin)
.SUFFIXES:
-include $(shell find $(B) -name '*.d' 2>/dev/null)
