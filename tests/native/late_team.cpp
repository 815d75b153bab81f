// A team that is late before it begins, as when a thread of the last one has no core: the caller must soon compute alone.
// Usage: late_team LIBRARY, which stands for torch's.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>

#include "threads.hpp"

int teams = 0;

// What threads.cpp finds in place of OpenMP's: a team of the caller alone, 3 ms late.
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned, unsigned) {
    ++teams;
    usleep(3000);
    function(data);
}

int main(int, char** arguments) {
    if (!dlopen(arguments[1], RTLD_LAZY)) return printf("%s\n", dlerror()), 1;
    int done = 0;
    auto part = [&](int64_t, int64_t) { ++done, usleep(10); };
    for (int call = 0; call < 200; ++call) baracuda::share_out(2, 4, part);
    if (done != 800) return printf("expected 800 parts, got %d\n", done), 1;
    if (teams < 1 || teams > 12) return printf("expected 1 to 12 teams of 200 calls, got %d\n", teams), 1;
    return 0;
}
