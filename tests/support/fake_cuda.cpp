// A CUDA driver that launches nothing: it keeps what launches were given, for a test to look at.
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

// A launch of a function that was declared, with the bytes of its parameters.
struct Launch {
    uint64_t function;
    uint32_t programs, threads, shared, size;
    unsigned char bytes[4096];
};

static std::map<uint64_t, std::vector<int>> declared;
static std::vector<Launch> launches;

extern "C" {

struct Record {
    uint64_t function, stream;
    uint32_t grid[3], block[3], shared, early, launches, encodes;
    uint64_t values[48];   // the first eight bytes of each parameter
    uint64_t matrix[10];   // what the last encoding was given
} record;

int count = 0;             // how many parameters the function takes: a driver knows, this one is told
int device = 0;            // of the current context; -1 for none
int result = 0;            // what the next launch answers

Record* fake_record() { return &record; }
void fake_set(int parameters, int current_device, int launch_result) {
    count = parameters, device = current_device, result = launch_result;
}

// The sizes of a function's parameters: a driver knows them, this one is told. Its launches are kept from now on.
void fake_declare(uint64_t function, const int* sizes, int number) { declared[function].assign(sizes, sizes + number); }
void fake_forget() { declared.clear(), launches.clear(); }
int fake_launches() { return int(launches.size()); }
const Launch* fake_launch(int i) { return &launches[i]; }

int cuGetErrorString(int, const char** text) { return *text = "an illegal fake access", 0; }
int cuDriverGetVersion(int* out) { return *out = 13000, 0; }
int cuDeviceGet(int* out, int ordinal) { return *out = ordinal, 0; }
int cuCtxGetDevice(int* out) { return device < 0 ? 201 : (*out = device, 0); }
int cuDevicePrimaryCtxRetain(void** context, int of) {
    return *context = reinterpret_cast<void*>(uintptr_t(of) + 1), 0;
}
int cuCtxSetCurrent(void* context) { return device = int(reinterpret_cast<uintptr_t>(context)) - 1, 0; }

struct Attribute {
    int id, padding, value[16];
};

struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
};

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void**) {
    if (result) return result;
    record.function = reinterpret_cast<uint64_t>(function), record.stream = reinterpret_cast<uint64_t>(config->stream);
    std::memcpy(record.grid, config->grid, sizeof record.grid);
    std::memcpy(record.block, config->block, sizeof record.block);
    record.shared = config->shared, record.early = 0, ++record.launches;
    for (unsigned i = 0; i < config->count; ++i)
        if (config->attributes[i].id == 6) record.early = config->attributes[i].value[0];
    for (int i = 0; i < count; ++i) std::memcpy(record.values + i, parameters[i], 8);
    if (const auto known = declared.find(record.function); known != declared.end()) {
        Launch launch{record.function, config->grid[0], config->block[0], config->shared, 0, {}};
        for (size_t i = 0; i < known->second.size(); launch.size += known->second[i], ++i)
            std::memcpy(launch.bytes + launch.size, parameters[i], known->second[i]);
        launches.push_back(launch);
    }
    return 0;
}

int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t*, int, int swizzle, int, int) {
    const uint64_t given[10] = {uint64_t(type), rank, reinterpret_cast<uint64_t>(address), sizes[0], sizes[1],
                                strides[0], box[0], box[1], uint64_t(swizzle), 0};
    std::memcpy(record.matrix, given, sizeof given);
    map[0] = reinterpret_cast<uint64_t>(address) ^ 0xfeed;
    std::memcpy(map + 1, given, sizeof given);
    ++record.encodes;
    return 0;
}
}
