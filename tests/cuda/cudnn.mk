# The double of cuDNN and its tests. Included by cuda.mk.
CD := $(B)/cuda-double
CUDNN_INC := $(firstword $(wildcard $(CUDA_HOME)/include/cudnn.h /usr/include/cudnn.h))
CUDNN_MAJOR := $(if $(CUDNN_INC),$(shell sed -n 's/^\#define CUDNN_MAJOR *//p' $(dir $(CUDNN_INC))cudnn_version.h))
CUDA_STUB := $(wildcard $(CUDA_HOME)/lib64/stubs/libcuda.so)
CUDNN_SAN := $(if $(filter address,$(SAN)),-fsanitize=address$(comma)undefined)
CUDNN_FLAGS := -std=c11 -D_GNU_SOURCE -g -fPIC -Wall -Wextra -Wshadow=local $(WERROR) $(CUDNN_SAN) -isystem $(dir $(CUDNN_INC)) -Icore -I$(B)/gen
CUDNN_DOUBLE := $(if $(CUDNN_INC),$(CD)/libcudnn.so.$(CUDNN_MAJOR) $(if $(CUDA_STUB),$(CD)/driver/libcuda.so.1) $(patsubst tests/cuda/%.c,$(CD)/%,$(wildcard tests/cuda/test_cudnn*.c)))

$(CD)/libcudnn.so.$(CUDNN_MAJOR): $(wildcard tests/cuda/double/cudnn_*.c tests/cuda/double/cudnn_*.h tests/cuda/double/cudnn.map)
	@mkdir -p $(@D)
	$(CC) $(CUDNN_FLAGS) -O3 -ffp-contract=off -shared -Wl,-soname,$(@F) -Wl,--version-script,tests/cuda/double/cudnn.map \
	  -DDDP_PROFILES='"$(CURDIR)/tests/cuda/profiles"' -DDDP_REAL_CUDNN_DIR='"$(CUDA_HOME)/lib64"' -o $@ $(filter %.c,$^) -lm -ldl -lpthread

# The driver, as much of it as the real cuDNN asks for when it makes plans for a device that is not there: it may load kernels,
# all else is missing (34: a stub).
$(CD)/driver/libcuda.so.1: $(CUDA_STUB)
	@mkdir -p $(@D)
	{ echo '#include <stdlib.h>'; \
	  echo 'int cuLibraryLoadData(void **l) { *l = malloc(1); return 0; }'; \
	  echo 'int cuLibraryGetKernel(void **k) { *k = malloc(1); return 0; }'; \
	  echo 'int cuLibraryUnload(void *l) { free(l); return 0; }'; \
	  nm -D --defined-only $(CUDA_STUB) | awk '$$2 == "T" && $$3 !~ /^cuLibrary(LoadData|GetKernel|Unload)$$/ { print "int " $$3 "(void) { return 34; }" }'; \
	} | $(CC) -O1 -w -shared -fPIC -Wl,-soname,libcuda.so.1 -x c - -o $@

$(CD)/test_cudnn%: tests/cuda/test_cudnn%.c tests/cuda/cudnn_test.h $(wildcard kernels/cudnn/*.c kernels/cudnn/*.h kernels/cuda/*.h) $(B)/libddp.so
	@mkdir -p $(@D)
	$(CC) $(CUDNN_FLAGS) -O1 -fvisibility=hidden -o $@ $< $(sort $(shell sed -n 's|^/\* with: \(.*\) \*/|\1|p' $<)) -L$(B) -lddp -lm -ldl -lpthread -Wl,-rpath,'$(CURDIR)/$(B)'

cuda-double: $(CUDNN_DOUBLE)
.PHONY: cuda-double
