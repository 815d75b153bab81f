#include "pool.hpp"

#include <dlfcn.h>

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

struct Task {
    void (*body)(void*, int64_t, int64_t);
    void* context;
    int64_t parts;

    void take(int64_t first, int64_t step) const {
        PlainFloats plain;
        for (int64_t part = first; part < parts; part += step) body(context, part, parts);
    }
};

// torch's own OpenMP threads, found where torch loaded them: a second pool would fight with them for the cores, since
// they spin for a while after each of torch's operations.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*thread)();
    int (*threads)();

    OpenMP()
        : parallel(reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"))),
          thread(reinterpret_cast<decltype(thread)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"))),
          threads(reinterpret_cast<decltype(threads)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"))) {}

    bool found() const { return parallel && thread && threads; }
};

const OpenMP& openmp() {
    static const OpenMP found;
    return found;
}

void take_in_team(void* task) {
    static_cast<const Task*>(task)->take(openmp().thread(), openmp().threads());
}

// Where there is no OpenMP, threads of our own for the length of a call.
void run_on_new_threads(const Task& task) {
    std::vector<std::thread> threads;
    int64_t next = 1;
    try {
        for (; next < task.parts; ++next)
            threads.emplace_back([&task, next] { task.take(next, task.parts); });
    } catch (...) {  // no more threads: the caller takes what is left
        for (int64_t part = next; part < task.parts; ++part) task.take(part, task.parts);
    }
    task.take(0, task.parts);
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

void run_parts(int64_t parts, void (*body)(void*, int64_t, int64_t), void* context) {
    Task task{body, context, parts};
    if (parts == 1) return task.take(0, 1);
    if (!openmp().found()) return run_on_new_threads(task);
    openmp().parallel(take_in_team, &task, unsigned(parts), 0);
}

}  // namespace baracuda
