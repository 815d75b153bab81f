// What a caller makes of waits: see Patience in threads.hpp.
#include <cstdio>

#include "threads.hpp"

using baracuda::Patience;

int failures = 0;
#define EXPECT(what) \
    if (!(what)) printf("line %d: expected %s\n", __LINE__, #what), ++failures

constexpr int64_t US = 1000, MS = 1000 * US;

int main() {
    Patience p;
    EXPECT(!p.is_alone());
    p.judge(90 * US, 20 * US, 2);
    EXPECT(!p.is_alone());  // threads wake up
    p.judge(3 * MS, 20 * US, 2);
    EXPECT(p.is_alone());
    p.spend(1 * MS, 2);  // half of it lost: a quarter of the wait is 0.75 ms
    EXPECT(p.is_alone());
    p.spend(MS / 2, 2);
    EXPECT(!p.is_alone());
    p.judge(3 * MS, 20 * US, 2);  // late again: now 3 ms
    p.spend(5 * MS, 2);
    EXPECT(p.is_alone());
    p.spend(2 * MS, 2);
    EXPECT(!p.is_alone());
    p.judge(10 * US, 20 * US, 2);  // in time: the next wait counts as the first
    p.judge(4 * MS, 20 * US, 2);
    p.spend(2 * MS, 2);
    EXPECT(!p.is_alone());

    Patience cores;  // a slower core among eight holds up less than computing alone would
    cores.judge(3 * MS / 2, 1 * MS, 8);
    EXPECT(!cores.is_alone());
    cores.judge(8 * MS, 1 * MS, 8);
    EXPECT(cores.is_alone());

    Patience stopped;  // ten minutes in the background are no reason to be alone for minutes
    for (int i = 0; i < 20; ++i) stopped.judge(600'000 * MS, 20 * US, 2);
    stopped.spend(2600 * MS, 2);
    EXPECT(!stopped.is_alone());
    return failures;
}
