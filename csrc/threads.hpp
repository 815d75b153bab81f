// The threads: the caller and others take the parts of a body that is called with (part, parts).
#pragma once
#include <cstdint>

namespace baracuda {

// The default rounding and no flushing of subnormals while it lives: torch.set_flush_denormal must not change our bits.
class PlainFloats {
    uint64_t before_;

public:
    PlainFloats();
    ~PlainFloats();
};

constexpr int64_t MAX_THREADS = 1024;

// A team is done when all of its threads are. Where other processes want the cores, one of them may be waiting for its
// time slice, with or without a part, and a call of 20 us takes 3 ms. After such a wait the caller computes alone until
// that has cost a quarter of it, and four times as much each time that the next try is late, too. Times in nanoseconds.
class Patience {
    static constexpr int64_t LATE = 100'000, LONGEST = 20'000'000;
    static constexpr double LEAST = 0.25, MORE = 4, MOST = 64;
    double alone_for_ = 0, factor_ = LEAST;

public:
    bool is_alone() const { return alone_for_ > 0; }

    // What computing alone took, of which a team would have saved its share.
    void spend(int64_t took, int64_t threads) { alone_for_ -= double(took) * double(threads - 1) / double(threads); }

    // After a team: what the caller waited for the others, and what it computed itself. A wait is late where it is longer
    // than the others' work takes alone. A process that was stopped meanwhile has waited LONGEST.
    void judge(int64_t waited, int64_t computed, int64_t threads) {
        if (waited <= LATE + (threads - 1) * computed) {
            factor_ = LEAST;
            return;
        }
        alone_for_ = factor_ * double(waited < LONGEST ? waited : LONGEST);
        if (factor_ < MOST) factor_ *= MORE;
    }
};

// Whose threads they are: torch's OpenMP ones, or threads that are started for each call.
const char* threads_in_use();

// `threads` is how many torch has set: its team has no other size.
void run_parts(int64_t threads, int64_t parts, void (*body)(void*, int64_t part, int64_t parts), void* context);

// Runs body(part, parts) for every part. Threads take the next part when they are done with one; more parts than threads
// even out what they take.
template <class Body>
void share_out(int64_t threads, int64_t parts, Body& body) {
    run_parts(
        threads, parts, [](void* context, int64_t part, int64_t of) { (*static_cast<Body*>(context))(part, of); }, &body);
}

// One part a thread.
template <class Body>
void share_out(int64_t threads, Body& body) {
    share_out(threads, threads, body);
}

}  // namespace baracuda
