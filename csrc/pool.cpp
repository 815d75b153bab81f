#include "pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
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

using Clock = std::chrono::steady_clock;

// Longer than what lies between two linears of a model, far shorter than a time slice.
constexpr std::chrono::microseconds WAKEFUL(200);

inline void pause() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Much longer than a part, far shorter than a time slice: who is not done by then is not running.
constexpr std::chrono::microseconds PATIENCE(30);

// Waits until done(). Leaves the core to others that want it, at once or after a while.
template <class Done>
void wait_until(Done done, Clock::duration patience) {
    const Clock::time_point start = Clock::now();
    for (int spins = 1; !done(); ++spins) {
        pause();
        if (spins % 32 == 0 && (patience == patience.zero() || Clock::now() - start > patience)) sched_yield();
    }
}

struct Task {
    void (*body)(void*, int64_t, int64_t);
    void* context;
    int64_t parts;
    alignas(64) std::atomic<int64_t> next{0};

    void take() {
        PlainFloats plain;
        for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) body(context, part, parts);
    }
};

// A thread that waits for calls: wide awake for a while after each, yielding its core to whoever wants it, then asleep.
struct Helper {
    alignas(64) std::atomic<uint32_t> call{0};
    std::atomic<bool> sleeps{false};
    std::mutex mutex;
    std::condition_variable woken;

    void ring() {
        call.fetch_add(1);
        if (!sleeps.load()) return;
        std::lock_guard<std::mutex> guard(mutex);
        woken.notify_one();
    }

    void wait_for(uint32_t seen) {
        const Clock::time_point end = Clock::now() + WAKEFUL;
        int spins = 0;
        wait_until([&] { return call.load() != seen || (++spins % 32 == 0 && Clock::now() > end); }, Clock::duration(0));
        if (call.load() != seen) return;
        std::unique_lock<std::mutex> lock(mutex);
        sleeps.store(true);
        woken.wait(lock, [&] { return call.load() != seen; });
        sleeps.store(false);
    }
};

// The caller never waits for a helper that has not come: it takes all the parts itself. It waits only for those that are
// in the middle of a part.
class Pool {
    std::mutex one_at_a_time_;
    std::atomic<Task*> task_{nullptr};
    std::atomic<int64_t> inside_{0};
    Helper* helpers_[MAX_THREADS] = {};
    int64_t started_ = 0;

    void serve(Helper& helper) {
        for (uint32_t seen = 0;;) {
            helper.wait_for(seen);
            seen = helper.call.load();
            inside_.fetch_add(1);  // before the task is read: see run
            if (Task* task = task_.load()) task->take();
            inside_.fetch_sub(1);
        }
    }

    void start(int64_t wanted) {
        for (; started_ < wanted; ++started_) {
            Helper* helper = new Helper;
            try {
                std::thread([this, helper] { serve(*helper); }).detach();
            } catch (...) {  // no more threads: the caller takes what is left
                delete helper;
                return;
            }
            helpers_[started_] = helper;
        }
    }

public:
    void run(Task& task, int64_t threads) {
        std::unique_lock<std::mutex> alone(one_at_a_time_, std::try_to_lock);
        if (!alone.owns_lock()) return task.take();  // another caller has the helpers
        start(threads - 1);
        task_.store(&task);
        for (int64_t i = 0; i < threads - 1 && i < started_; ++i) helpers_[i]->ring();
        task.take();
        task_.store(nullptr);  // who is not inside by now finds nothing to do
        wait_until([&] { return inside_.load() == 0; }, PATIENCE);
    }
};

// Never destroyed: its threads live as long as the process. The child of a fork has none of them, and makes its own.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        the_pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool; });
    });
    return *the_pool;
}

}  // namespace

void run_parts(int64_t threads, int64_t parts, void (*body)(void*, int64_t, int64_t), void* context) {
    Task task{body, context, parts};
    if (threads == 1 || parts <= 1) return task.take();
    pool().run(task, threads < parts ? threads : parts);
}

}  // namespace baracuda
