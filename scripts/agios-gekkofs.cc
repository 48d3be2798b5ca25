// Uses AGIOS as the daemon of GekkoFS's forwarding mode does, through GekkoFS's own header and unit: each of its I/O threads adds a
// request, waits until it is called back, does the I/O and releases the request. Built by scripts/agios-programs.sh; silent
// and 0 if all were served.
#include <daemon/scheduler/agios.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {
constexpr int THREADS = 8;
constexpr int REQUESTS = 2000;

// As an ABT_eventual.
struct Eventual {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_set = false;

    void set() {
        std::lock_guard<std::mutex> lock(mutex);
        is_set = true;
        changed.notify_one();
    }

    bool wait() {
        std::unique_lock<std::mutex> lock(mutex);
        return changed.wait_for(lock, std::chrono::seconds(20), [this] { return is_set; });
    }
};

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}
} // namespace

#if AGIOS_API == 1
void agios_callback(void *info) { static_cast<Eventual *>(info)->set(); }

void agios_callback_aggregated(void **infos, int total) {
    for (int i = 0; i < total; i++) agios_callback(infos[i]);
}

static bool start(char *configuration) {
    agios_client.process_request = agios_callback;
    agios_client.process_requests = agios_callback_aggregated;
    return agios_init(&agios_client, configuration, 0) == 0;
}

static bool add(char *path, int type, int64_t offset, int64_t size, Eventual &eventual) {
    return agios_add_request(path, type, offset, size, &eventual, &agios_client, 0) == 0;
}

static bool release(char *path, int type, int64_t size, int64_t offset) {
    return agios_release_request(path, type, size, offset, 0, size);
}
#else
void *agios_eventual_callback(int64_t, void *info) {
    static_cast<Eventual *>(info)->set();
    return nullptr;
}

static bool start(char *configuration) { return agios_init(NULL, NULL, configuration, 0); }

static bool add(char *path, int type, int64_t offset, int64_t size, Eventual &eventual) {
    return agios_add_request(path, type, offset, size, generate_unique_id(), 0, agios_eventual_callback, &eventual);
}

static bool release(char *path, int type, int64_t size, int64_t offset) {
    return agios_release_request(path, type, size, offset);
}
#endif

// A part of each file for each thread; its first write has no bytes, as GekkoFS sends some.
static void serve(int thread) {
    std::string path = "/file" + std::to_string(thread % 3);
    for (int i = 0; i < REQUESTS; i++) {
        const int64_t size = i == 0 ? 0 : 4096, offset = (int64_t(thread) * REQUESTS + i) * 4096;
        const int type = i % 2 ? 0 : 1;
        Eventual eventual;
        if (!add(&path[0], type, offset, size, eventual)) fail("a request is refused");
        if (!eventual.wait()) fail("a request is not served");
        if (!release(&path[0], type, size, offset)) fail("a request cannot be released");
    }
}

int main(int argc, char **argv) {
    if (argc != 2 || !start(argv[1])) fail("AGIOS does not start");
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; i++) threads.emplace_back(serve, i);
    for (auto &thread : threads) thread.join();
    agios_exit();
    return 0;
}
