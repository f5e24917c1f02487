// gloo.cc -- bytes between ranks through gloo's TCP transport; everything else is core/comm/wire.c's. gloo's interface is
// C++, so this file is. No exception leaves it.
extern "C" {
#include "../../core/comm/wire.h"
}

#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <pthread.h>
#include <sched.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Buffer = gloo::transport::UnboundBuffer;
using std::chrono::milliseconds;

const milliseconds kForever(1000000000); // deadlines are the queue's

// The job's store as gloo wants one.
class Store : public gloo::rendezvous::Store {
  public:
    Store(const ddp_boot *boot, double until) : boot_(boot), until_(until) {}
    void set(const std::string &key, const std::vector<char> &data) override {
        if (ddp__wire_set(boot_, key.c_str(), data.data(), data.size()) < 0) throw std::runtime_error("the store");
    }
    std::vector<char> get(const std::string &key) override {
        void *value = nullptr;
        size_t n = 0;
        if (ddp__wire_get(boot_, key.c_str(), until_, &value, &n) < 0) throw std::runtime_error("the store");
        std::vector<char> data(static_cast<char *>(value), static_cast<char *>(value) + n);
        std::free(value);
        return data;
    }
    void wait(const std::vector<std::string> &keys) override {
        for (const std::string &key : keys) get(key);
    }
    void wait(const std::vector<std::string> &keys, const milliseconds &) override { wait(keys); }

  private:
    const ddp_boot *boot_;
    double until_;
};

struct Wire {
    std::shared_ptr<gloo::rendezvous::Context> context;
    uint64_t exchanges = 0;
    std::mutex lock; // guards what follows
    bool stopped = false;
    std::vector<std::unique_ptr<Buffer>> in, out; // of the exchange that runs
};

// A thread that is created under SCHED_BATCH keeps it: as a normal one, gloo's spins on a lock whose holder it has
// driven from the core, for milliseconds.
std::shared_ptr<gloo::transport::Device> make_device(const gloo::transport::tcp::attr &attr) {
    struct sched_param none = {}, before = {};
    int policy = SCHED_OTHER;
    pthread_getschedparam(pthread_self(), &policy, &before);
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
    auto device = gloo::transport::tcp::CreateDevice(attr);
    pthread_setschedparam(pthread_self(), policy, &before);
    return device;
}

int join(void **self, const ddp_boot *b) {
    char iface[64], address[64];
    ddp__wire_address(b, iface, sizeof iface, address, sizeof address);
    gloo::transport::tcp::attr attr;
    attr.iface = iface;
    attr.hostname = address; // a number: nothing is looked up
    try {
        auto wire = std::make_unique<Wire>();
        auto device = make_device(attr);
        Store store(b, ddp_now() + b->timeout);
        wire->context = std::make_shared<gloo::rendezvous::Context>(b->rank, b->size);
        wire->context->setTimeout(milliseconds(static_cast<int64_t>(b->timeout * 1000) + 1));
        wire->context->connectFullMesh(store, device);
        *self = wire.release();
        return 0;
    } catch (const std::exception &e) {
        return ddp__fail(DDP_EIO, "init: gloo cannot connect the ranks from %s: %s", iface[0] ? iface : address,
                         e.what());
    }
}

// The slot of a part: exchanges and, within one, the parts between two ranks are numbered alike on both sides.
void begin(Wire *w, std::vector<std::unique_ptr<Buffer>> &to, const ddp_part *part, int n, bool receive, int *rank) {
    std::vector<uint64_t> nth(static_cast<size_t>(w->context->size));
    for (int i = 0; i < n; i++) {
        uint64_t slot = w->exchanges << 16 | nth[static_cast<size_t>(part[i].rank)]++;
        if (part[i].n == 0) continue;
        *rank = part[i].rank;
        auto buffer = w->context->createUnboundBuffer(part[i].p, part[i].n);
        if (receive) buffer->recv(part[i].rank, slot);
        else buffer->send(part[i].rank, slot);
        to.push_back(std::move(buffer));
    }
}

// Waits for all parts; *rank is whom it waits for, also after an exception. False: stopped.
bool finish(std::vector<std::unique_ptr<Buffer>> &buffers, const ddp_part *part, int n, bool receive, int *rank) {
    size_t k = 0;
    for (int i = 0; i < n; i++) {
        if (part[i].n == 0) continue;
        *rank = part[i].rank;
        Buffer *b = buffers[k++].get();
        if (!(receive ? b->waitRecv(nullptr, kForever) : b->waitSend(nullptr, kForever))) return false;
    }
    return true;
}

int exchange(void *self, const ddp_part *out, int n_out, const ddp_part *in, int n_in, int *lost) {
    Wire *w = static_cast<Wire *>(self);
    bool whole = false;
    w->exchanges++;
    try {
        {
            std::lock_guard<std::mutex> guard(w->lock);
            if (!w->stopped) {
                begin(w, w->in, in, n_in, true, lost);
                begin(w, w->out, out, n_out, false, lost);
                whole = true;
            }
        }
        whole = whole && finish(w->in, in, n_in, true, lost) && finish(w->out, out, n_out, false, lost);
    } catch (const std::exception &) {
        whole = false; // *lost is the rank
    }
    std::lock_guard<std::mutex> guard(w->lock);
    w->in.clear();
    w->out.clear();
    if (whole) return 0;
    if (w->stopped) *lost = -1;
    return ddp__fail(DDP_EPEER, "gloo: a connection is lost");
}

void stop(void *self) {
    Wire *w = static_cast<Wire *>(self);
    std::lock_guard<std::mutex> guard(w->lock);
    w->stopped = true;
    for (auto &b : w->in) b->abortWaitRecv();
    for (auto &b : w->out) b->abortWaitSend();
}

void leave(void *self, int graceful) {
    Wire *w = static_cast<Wire *>(self);
    (void)graceful;
    try {
        if (w->context) w->context->closeConnections();
    } catch (const std::exception &) { // what is lost already needs no closing
    }
    try {
        delete w;
    } catch (const std::exception &) {
    }
}

int init(ddp_comm **out, const ddp_boot *b) {
    static const ddp_wire wire = {"gloo", join, exchange, stop, leave};
    return ddp__wire_init(out, b, &wire);
}

} // namespace

// What core/comm/engines.c looks for.
extern "C" __attribute__((visibility("default"))) const ddp_engine *ddp_plugin_engine() {
    static ddp_engine engine;
    if (!engine.size) ddp__queue_engine(&engine, "gloo", init);
    return &engine;
}
