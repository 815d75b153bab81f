// The threads: a caller and its helpers take the parts of a body that is called with (part, parts).
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

void run_parts(int64_t threads, int64_t parts, void (*body)(void*, int64_t part, int64_t parts), void* context);

// Runs body(part, parts) for every part. Threads take the next part when they are done with one, so that a late thread
// holds up nobody; more parts than threads even out what they take.
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
