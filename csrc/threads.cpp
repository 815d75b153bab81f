#include "threads.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace baracuda {

#if defined(__SSE2__)
PlainFloats::PlainFloats() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
PlainFloats::~PlainFloats() { _mm_setcsr(uint32_t(before_)); }
#elif defined(__aarch64__)
PlainFloats::PlainFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
}
PlainFloats::~PlainFloats() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
#else
PlainFloats::PlainFloats() : before_(0) {}
PlainFloats::~PlainFloats() {}
#endif

namespace {

int64_t nanoseconds() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Task {
    void (*body)(void*, int64_t, int64_t);
    void* context;
    int64_t parts;
    const pthread_t caller = pthread_self();
    int64_t computed = 0;  // nanoseconds from the caller's first part to when it found no more
    alignas(64) std::atomic<int64_t> next{0};

    void take() {
        PlainFloats plain;
        for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) body(context, part, parts);
    }
    // Until `more` says no, asked after each part: whether all parts are taken.
    template <class More>
    bool take_while(More more) {
        PlainFloats plain;
        for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
            body(context, part, parts);
            if (!more()) return next.load(std::memory_order_relaxed) >= parts;
        }
        return true;
    }
    void take_in_team() {
        const int64_t start = nanoseconds();
        take();
        if (pthread_equal(pthread_self(), caller)) computed = nanoseconds() - start;
    }
};

// The entry of GNU's OpenMP runtime, which the others (LLVM's, Intel's) have too: runs a function in every thread of the
// caller's team, of as many threads as torch has set.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
constexpr unsigned AS_SET = 0;

// Torch's threads stay awake for some milliseconds after each of its operations. Threads of our own would compete with
// them for the cores, between any two operations of a model. So this is the runtime that torch itself calls, found in the
// order in which its own symbols are: what is preloaded or global comes before what it was linked with.
Parallel find_team() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!torch) return nullptr;
    void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return reinterpret_cast<Parallel>(found ? found : dlsym(torch, "GOMP_parallel"));
}

std::atomic<bool> is_busy{false}, is_forked{false};

Parallel team() {
    static const Parallel found = [] {
        // The child of a fork has none of its parent's threads, and the runtime would wait for them for ever.
        pthread_atfork(nullptr, nullptr, [] { is_forked = true, is_busy = false; });
        return find_team();
    }();
    return is_forked.load(std::memory_order_relaxed) ? nullptr : found;
}

void start_threads(Task& task, int64_t threads) {
    std::vector<std::thread> started;
    try {
        started.reserve(threads - 1);
        while (int64_t(started.size()) < threads - 1) started.emplace_back([&task] { task.take(); });
    } catch (...) {  // no more threads: the others take what is left
    }
    task.take();
    for (std::thread& thread : started) thread.join();
}

Patience patience;  // only who holds is_busy touches it

void run_team(Parallel parallel, Task& task, int64_t threads) {
    int64_t start = nanoseconds();
    if (patience.is_alone()) {
        const bool done = task.take_while([&] {
            const int64_t now = nanoseconds();
            patience.spend(now - start, threads);
            start = now;
            return patience.is_alone();
        });
        if (done) return;
    }
    parallel([](void* shared) { static_cast<Task*>(shared)->take_in_team(); }, &task, AS_SET, 0);
    // The caller waits for the others before the team begins, too: until they have left the one before.
    patience.judge(nanoseconds() - start - task.computed, task.computed, threads);
}

}  // namespace

const char* threads_in_use() { return team() ? "torch's OpenMP threads" : "threads started for each call"; }

void run_parts(int64_t threads, int64_t parts, void (*body)(void*, int64_t, int64_t), void* context) {
    Task task{body, context, parts};
    if (threads == 1 || parts <= 1) return task.take();
    if (is_busy.exchange(true, std::memory_order_acquire)) return task.take();  // another caller has the cores
    if (Parallel parallel = team()) {
        run_team(parallel, task, threads);
    } else {
        start_threads(task, threads < parts ? threads : parts);
    }
    is_busy.store(false, std::memory_order_release);
}

}  // namespace baracuda
