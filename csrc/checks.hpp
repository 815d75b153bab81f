// What the compiled module checks of its arguments: only what it alone would be hurt by, since Python checks tensors.
#pragma once
#include <stdexcept>
#include <string>

#include "job.hpp"
#include "threads.hpp"

namespace baracuda {

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument("baracuda._cpu: " + what); }

inline void require(bool good, const char* what) {
    if (!good) refuse(std::string("expected ") + what);
}

constexpr int64_t SMALL = 65536;  // elements: below, waking a thread costs more than it saves

inline int64_t checked_threads(int64_t threads, int64_t elements) {
    require(threads >= 1 && threads <= MAX_THREADS, "1 to 1024 threads");
    return elements < SMALL ? 1 : threads;
}

inline int64_t product(int64_t a, int64_t b) {
    int64_t result;
    require(a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, &result), "sizes whose product fits 62 bits");
    require(result < int64_t(1) << 58, "sizes whose product fits 58 bits");
    return result;
}

inline char* checked(uint64_t address, int64_t elements, const char* name) {
    if (elements > 0 && address == 0) refuse(std::string(name) + ": expected an address, got 0");
    return reinterpret_cast<char*>(address);
}

inline int checked_float(int element) {
    require(element >= F16 && element <= F64, "a float element code");
    return element;
}

// Rows of `length` elements, `pitch` storage units apart; DENSE stands for as many as a row has.
constexpr int64_t DENSE = -1;

inline int64_t checked_pitch(int64_t pitch, int64_t units) {
    require(pitch >= DENSE, "a row pitch that is not negative, or -1 for dense rows");
    return pitch == DENSE ? units : pitch;
}

inline Rows rows_of(char* data, int64_t length, int64_t pitch, int64_t units) {
    Rows rows;
    rows.data = data;
    rows.length = length > 0 ? length : 1;
    rows.pitch = checked_pitch(pitch, units);
    rows.dense = rows.pitch == units;
    return rows;
}

}  // namespace baracuda
