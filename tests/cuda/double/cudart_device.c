/* cudart_device.c -- devices, versions and error texts of cudart. */
#include "state.h"

#include <stdio.h>
#include <string.h>

size_t double_shared_optin(void);

/* ---- versions and errors ------------------------------------------------------------------------------------------- */
/* Without a driver the version is 0, and no error. */
cudaError_t cudaDriverGetVersion(int *version) {
    ddp_double_lock();
    if (!version) return leave(cudaErrorInvalidValue);
    bool absent = config.status == cudaErrorStubLibrary ||
                  (config.status == cudaErrorInsufficientDriver && config.driver >= CUDART_VERSION / 1000 * 1000);
    *version = absent ? 0 : config.driver;
    return leave(cudaSuccess);
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    ddp_double_lock();
    if (!version) return leave(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return leave(cudaSuccess);
}

cudaError_t cudaGetLastError(void) {
    ddp_double_lock();
    cudaError_t e = ddp_double_stuck(current_device);
    if (!e) e = last_error;
    last_error = cudaSuccess;
    ddp_double_unlock();
    return e;
}
cudaError_t cudaPeekAtLastError(void) {
    ddp_double_lock();
    cudaError_t e = ddp_double_stuck(current_device);
    ddp_double_unlock();
    return e ? e : last_error;
}

static const struct {
    cudaError_t e;
    const char *name;
} names[] = {
#include "error_names.h"
};

const char *cudaGetErrorName(cudaError_t e) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].e == e) return names[i].name;
    return "unrecognized error code";
}

/* Short texts of our own; what has none is told by its name. */
const char *cudaGetErrorString(cudaError_t e) {
    static const struct {
        cudaError_t e;
        const char *text;
    } texts[] = {{cudaSuccess, "no error"},
                 {cudaErrorInvalidValue, "invalid argument"},
                 {cudaErrorMemoryAllocation, "out of memory"},
                 {cudaErrorInvalidConfiguration, "invalid configuration argument"},
                 {cudaErrorStubLibrary, "CUDA driver is a stub library"},
                 {cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"},
                 {cudaErrorNoDevice, "no CUDA-capable device is detected"},
                 {cudaErrorInvalidDevice, "invalid device ordinal"},
                 {cudaErrorNotReady, "device not ready"},
                 {cudaErrorIllegalAddress, "an illegal memory access was encountered"},
                 {cudaErrorLaunchFailure, "unspecified launch failure"},
                 {cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"},
                 {cudaErrorUnknown, "unknown error"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].e == e) return texts[i].text;
    return cudaGetErrorName(e);
}

/* ---- devices ------------------------------------------------------------------------------------------------------- */
cudaError_t cudaGetDeviceCount(int *count) {
    if (count) *count = 0;
    cudaError_t e = enter_always("cudaGetDeviceCount");
    if (e) return e;
    if (!count) return leave(cudaErrorInvalidValue);
    *count = config.devices;
    return leave(cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
    cudaError_t e = enter_always("cudaSetDevice");
    if (e) return e;
    if (device < 0 || device >= config.devices) return leave(cudaErrorInvalidDevice);
    current_device = device;
    return leave(ddp_double_stuck(device));
}
cudaError_t cudaGetDevice(int *device) {
    cudaError_t e = enter_always("cudaGetDevice");
    if (e) return e;
    if (!device) return leave(cudaErrorInvalidValue);
    *device = current_device;
    return leave(cudaSuccess);
}
cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t e = enter("cudaDeviceSynchronize");
    if (e) return e;
    if ((e = refuse_in_any_capture())) return leave(e);
    wait_device(current_device);
    return leave(ddp_double_stuck(current_device));
}
/* Only waits: what was made stays, and is reported when nobody frees it. */
cudaError_t cudaDeviceReset(void) {
    cudaError_t e = enter("cudaDeviceReset");
    if (e) return e;
    wait_device(current_device);
    return leave(ddp_double_stuck(current_device));
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    cudaError_t e = enter_always("cudaGetDeviceProperties");
    if (e) return e;
    if (!p) return leave(cudaErrorInvalidValue);
    if (device < 0 || device >= config.devices) return leave(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "CUDA double sm_%d", config.cc);
    ddp_double_uuid(device, (unsigned char *)p->uuid.bytes);
    p->totalGlobalMem = config.memory;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = double_shared_optin();
    p->sharedMemPerMultiprocessor = double_shared_optin() + 1024;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->memPitch = 0x7fffffff;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 64 << 10;
    p->major = config.cc / 10;
    p->minor = config.cc % 10;
    p->textureAlignment = 512;
    p->multiProcessorCount = config.sms;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = p->ECCEnabled = 1;
    p->streamPrioritiesSupported = p->hostRegisterSupported = p->memoryPoolsSupported = 1;
    p->pciBusID = 0x10 * (config.physical[device] + 1);
    p->asyncEngineCount = 3;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 50 << 20;
    return leave(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e) return e;
    if (!value) return cudaErrorInvalidValue;
    switch ((int)attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
        case cudaDevAttrWarpSize: *value = p.warpSize; break;
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
        case cudaDevAttrPciBusId: *value = p.pciBusID; break;
        case cudaDevAttrPciDeviceId: *value = p.pciDeviceID; break;
        case cudaDevAttrPciDomainId: *value = p.pciDomainID; break;
        case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
        case cudaDevAttrClockRate: *value = 1500000; break;
        case cudaDevAttrMemoryClockRate: *value = 2500000; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
        default: ddp_double_unsimulated("cudaDeviceGetAttribute: this attribute");
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    cudaError_t e = enter_always("cudaDeviceGetPCIBusId");
    if (e) return e;
    if (!text || size < 13 || device < 0 || device >= config.devices) return leave(cudaErrorInvalidValue);
    snprintf(text, (size_t)size, "0000:%02x:00.0", 0x10 * (config.physical[device] + 1));
    return leave(cudaSuccess);
}

/* ---- peers --------------------------------------------------------------------------------------------------------- */
static bool peer[MAX_DEVICES][MAX_DEVICES];

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) {
    cudaError_t e = enter("cudaDeviceCanAccessPeer");
    if (e) return e;
    if (!can) return leave(cudaErrorInvalidValue);
    if (device < 0 || other < 0 || device >= config.devices || other >= config.devices)
        return leave(cudaErrorInvalidDevice);
    *can = device != other;
    return leave(cudaSuccess);
}
cudaError_t cudaDeviceEnablePeerAccess(int other, unsigned flags) {
    cudaError_t e = enter("cudaDeviceEnablePeerAccess");
    if (e) return e;
    if (flags) return leave(cudaErrorInvalidValue);
    if (other < 0 || other >= config.devices || other == current_device) return leave(cudaErrorInvalidDevice);
    if (peer[current_device][other]) return leave(cudaErrorPeerAccessAlreadyEnabled);
    peer[current_device][other] = true;
    return leave(cudaSuccess);
}
cudaError_t cudaDeviceDisablePeerAccess(int other) {
    cudaError_t e = enter("cudaDeviceDisablePeerAccess");
    if (e) return e;
    if (other < 0 || other >= config.devices) return leave(cudaErrorInvalidDevice);
    if (!peer[current_device][other]) return leave(cudaErrorPeerAccessNotEnabled);
    peer[current_device][other] = false;
    return leave(cudaSuccess);
}
