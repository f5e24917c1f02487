// nvrtc.cc -- a double of NVRTC: a generated kernel is compiled by g++ against the emulator into a shared object, and the "cubin" is
// the text "DDPEMU:" with that file's path, which the double of cudart loads. One kernel a program, its argument one struct, and its
// threads never meet.
#pragma GCC visibility push(default)
#include <nvrtc.h>
#pragma GCC visibility pop

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

extern "C" {
#include "double.h"
}

struct _nvrtcProgram {
    std::string source, log, image;
    std::vector<std::pair<std::string, std::string>> headers; // name, text
};

namespace {
nvrtcResult fault(const char *function) { return (nvrtcResult)ddp_double_fault(function, 0); }

std::string folder() // of this library
{
    Dl_info info;
    dladdr((void *)&folder, &info);
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

void write(const std::string &path, const std::string &text) { std::ofstream(path) << text; }
std::string read(const std::string &path) {
    std::ifstream f(path);
    return std::string(std::istreambuf_iterator<char>(f), std::istreambuf_iterator<char>());
}

// "extern "C" __global__ void NAME(const ARGS a)": the entry that the emulator is to have.
bool entry_of(const std::string &source, std::string *name, std::string *args) {
    char n[128], a[128];
    size_t at = source.find("extern \"C\" __global__ void ");
    if (at == std::string::npos || sscanf(source.c_str() + at, "extern \"C\" __global__ void %127[A-Za-z0-9_](const %127s", n, a) != 2)
        return false;
    *name = n;
    *args = a;
    return true;
}

std::string compile_command(const std::string &dir, const std::string &out) {
    return std::string("cd ") + dir + "/in && " DOUBLE_CXX " -std=c++17 -O1 -fPIC -shared -fvisibility=hidden -ffp-contract=off -w -include emu.h -I. "
           "-I" DOUBLE_EMU " -isystem " DOUBLE_CUDA_INCLUDE " '-DDDP_KERNELS_DEF=\"entry.def\"' '-DDDP_KERNELS_ARGS=\"args.h\"' -x c++ generated.cu " DOUBLE_EMU
           "/entries.cc -x none " DOUBLE_EMU_OBJECTS "/emu.o " DOUBLE_EMU_OBJECTS "/fiber.o -o " + out + " > ../log 2>&1";
}
} // namespace

extern "C" {
const char *nvrtcGetErrorString(nvrtcResult r) {
    switch (r) {
        case NVRTC_SUCCESS: return "NVRTC_SUCCESS";
        case NVRTC_ERROR_OUT_OF_MEMORY: return "NVRTC_ERROR_OUT_OF_MEMORY";
        case NVRTC_ERROR_COMPILATION: return "NVRTC_ERROR_COMPILATION";
        case NVRTC_ERROR_INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        default: return "NVRTC_ERROR unknown";
    }
}

nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = (int)ddp_double_setting("DDP_DOUBLE_NVRTC", CUDART_VERSION) / 1000;
    *minor = (int)ddp_double_setting("DDP_DOUBLE_NVRTC", CUDART_VERSION) % 1000 / 10;
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram *out, const char *source, const char *, int n, const char *const *texts, const char *const *names) {
    if (nvrtcResult r = fault("nvrtcCreateProgram")) return r;
    if (!out || !source) return NVRTC_ERROR_INVALID_INPUT;
    *out = new _nvrtcProgram;
    (*out)->source = source;
    for (int i = 0; i < n; i++) (*out)->headers.emplace_back(names[i], texts[i]);
    ddp_double_count("NVRTC program", 1);
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram *p) {
    if (!p || !*p) return NVRTC_ERROR_INVALID_PROGRAM;
    delete *p;
    *p = nullptr;
    ddp_double_count("NVRTC program", -1);
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram p, int n, const char *const *options) {
    if (nvrtcResult r = fault("nvrtcCompileProgram")) return r;
    if (!p) return NVRTC_ERROR_INVALID_PROGRAM;
    bool arch = false;
    for (int i = 0; i < n; i++) arch = arch || std::string(options[i]).rfind("-arch=sm_", 0) == 0;
    if (!arch) return NVRTC_ERROR_INVALID_OPTION;
    std::string name, args, made = folder() + "/nvrtc";
    if (!entry_of(p->source, &name, &args)) ddp_double_unsimulated("NVRTC: a source without one kernel of one struct");
    mkdir(made.c_str(), 0777);
    std::string dir = made + "/XXXXXX";
    if (!mkdtemp(&dir[0])) ddp_double_die("NVRTC: no folder %s", dir.c_str());
    mkdir((dir + "/in").c_str(), 0777);
    for (auto &h : p->headers)
        if (h.first != "stdint.h") write(dir + "/in/" + h.first, h.second);
    std::string source = p->source;
    size_t break_at = ddp_double_setting("DDP_DOUBLE_NVRTC_BREAKS", 0) ? source.find("widen(") : std::string::npos;
    if (break_at != std::string::npos) source.replace(break_at, 5, "absent");
    write(dir + "/in/generated.cu", source);
    write(dir + "/in/entry.def", "KERNEL(" + name + ", " + args + ", FLAT)\n");
    std::string out = dir + "/kernel.so";
    int status = system(compile_command(dir, out).c_str());
    p->log = read(dir + "/log");
    ddp_double_log("nvrtcCompileProgram %s: %d", name.c_str(), status);
    if (status != 0) {
        for (size_t at = 0; (at = p->log.find(".cu:", at)) != std::string::npos;) { // "generated.cu:12:5: error" as NVRTC has it
            size_t end = p->log.find(':', at + 4), next = p->log.find(':', end + 1);
            if (next == std::string::npos) break;
            p->log.replace(at, next - at, ".cu(" + p->log.substr(at + 4, end - at - 4) + ")");
            at += 4;
        }
        return NVRTC_ERROR_COMPILATION;
    }
    p->image = "DDPEMU:" + out;
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram p, size_t *n) {
    *n = p->log.size() + 1;
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram p, char *log) {
    p->log.copy(log, p->log.size());
    log[p->log.size()] = 0;
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram p, size_t *n) {
    if (nvrtcResult r = fault("nvrtcGetCUBINSize")) return r;
    *n = p->image.size() + 1;
    return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram p, char *image) {
    p->image.copy(image, p->image.size());
    image[p->image.size()] = 0;
    return NVRTC_SUCCESS;
}
}
