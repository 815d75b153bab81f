// Random problems over random bits, in buffers that end where they must: every instruction set must give the same bytes
// on any number of threads, and write nothing else. The digest of all results is the same on every machine.
// Usage: fuzz [rounds] [seed]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "isa.hpp"
#include "job.hpp"
#include "threads.hpp"

using namespace baracuda;

namespace {

std::mt19937_64 engine;

// FNV-1a.
uint64_t digest = 14695981039346656037u;

void note(const char* bytes, size_t size) {
    for (size_t i = 0; i < size; ++i) digest = (digest ^ uint8_t(bytes[i])) * 1099511628211u;
}

// A NaN of floats that need not be canonical counts as one value: its sign depends on the processor.
void note(std::vector<float> numbers) {
    for (float& x : numbers) x = x == x ? x : std::numeric_limits<float>::quiet_NaN();
    note(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float));
}

int64_t upto(int64_t n) { return int64_t(engine() % uint64_t(n + 1)); }

std::vector<Isa> isas() {
    std::vector<Isa> all;
    for (const Isa& compiled : compiled_isas())
        if (compiled.runs_here) all.push_back(compiled);
    return all;
}

// Exactly as long as asked: the sanitizer sees the first byte beyond.
struct Buffer {
    std::unique_ptr<char[]> data;
    int64_t size;

    explicit Buffer(int64_t bytes) : data(new char[bytes]), size(bytes) {
        for (int64_t i = 0; i < bytes; ++i) data[i] = char(engine());
    }
    void poison() { memset(data.get(), 0x77, size); }
    std::vector<char> copy() const { return {data.get(), data.get() + size}; }
};

Rows rows(Buffer& buffer, int64_t length, int64_t pitch, bool dense) {
    Rows r;
    r.data = buffer.data.get();
    r.length = length ? length : 1;
    r.pitch = pitch;
    r.dense = dense;
    return r;
}

// A canonical view and the last axis that goes with it.
void shape(Problem& p) {
    static const int64_t sizes[] = {1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 64, 127, 130, 513, 1023, 1024, 1025, 2049};
    auto size = [&](int64_t limit) {
        int64_t n = sizes[upto(17)];
        return n > limit ? 1 + n % limit : n;
    };
    switch (upto(3)) {
        case 0: {  // one segment
            p.last = size(3000);
            p.view = {1, 1, p.last * size(40), 1};
            break;
        }
        case 1: {  // groups or tokens
            int64_t run = size(2100), groups = size(6);
            p.last = run * groups;
            p.view = {1, groups * size(30), run, 1};
            break;
        }
        case 2: {  // channels inside
            p.last = size(70);
            p.view = {size(5), 1 + size(9), 1 + p.last * size(20), 1};
            p.view.run = p.last * size(20);
            break;
        }
        default: {  // strided
            p.last = size(2100);
            p.view = {1, size(20), size(9), p.last * size(3)};
        }
    }
    if (upto(15)) return;
    switch (upto(4)) {  // an axis of length 0: before, in, or after the segments; or the last one
        case 0: p.view.repeat = 0; break;
        case 1: p.view.rows = 0; break;
        case 2: p.view.run = 0; break;
        case 3: p.view.inner = 0; break;
        default: p.view.run = 0, p.last = 0;
    }
}

struct Case {
    Job job;
    std::vector<Buffer> buffers;
    std::vector<Buffer*> outputs;
    bool dynamic = false;
};

int64_t stored(int kind, int64_t n) { return is_packed(kind) ? (n + 1) / 2 : n; }

void build(Case& c) {
    Problem& p = c.job.p;
    p.op = int(upto(OP_COUNT - 1));
    p.element = int(upto(3));
    p.quantized = S8 + int(upto(3));
    p.scale_element = p.element == F64 ? F64 : upto(1) ? F32 : p.element;
    const int low[] = {-128, 0, -8, 0}, high[] = {127, 255, 7, 15};
    p.q_min = low[p.quantized - S8], p.q_max = high[p.quantized - S8];
    p.asymmetric = upto(1), p.include_zero = upto(1), p.reciprocal = upto(2) == 0;
    shape(p);
    const int64_t n = p.view.numel(), segments = p.view.segments(), lines = n ? n / p.last : 0, wide = p.last + upto(1) * 3;
    const int64_t size = bytes_of(p.element);
    c.dynamic = p.op >= DYNAMIC_QUANTIZE;
    c.buffers.reserve(9);
    auto add = [&](int64_t bytes) -> Buffer& {
        c.buffers.emplace_back(bytes);
        return c.buffers.back();
    };
    const bool dense = wide == p.last;
    const int64_t strided = lines ? ((lines - 1) * wide + p.last) * size : 0;
    if (p.op == DEQUANTIZE) {
        c.job.x = rows(add(stored(p.quantized, p.last) * lines), p.last, stored(p.quantized, p.last), true);
    } else if (p.op != DEQUANTIZE_BACKWARD) {
        c.job.x = rows(add(strided), p.last, wide, dense);
    }
    if (p.op >= QUANTIZE_BACKWARD && p.op <= FAKE_QUANTIZE_LEARNED_BACKWARD)
        c.job.dy = rows(add(strided), p.last, wide, dense);
    if (c.dynamic) {
        Buffer& scale = add(segments * bytes_of(p.scale_element));
        Buffer& zero_point = add(segments * 4);
        c.job.scale_out = scale.data.get();
        c.job.zero_point_out = reinterpret_cast<int32_t*>(zero_point.data.get());
        c.job.keys = reinterpret_cast<int64_t*>(add(segments * 16).data.get());
        c.outputs = {&scale, &zero_point};
    } else {
        if (upto(3)) c.job.scale = rows(add(segments * 4), segments, segments, true);
        if (upto(2)) c.job.zero_point = rows(add(segments * 4), segments, segments, true);
        c.job.scale_code = F32;
        c.job.scale_number = 0.37;
        c.job.zero_point_number = int32_t(upto(300)) - 150;
    }
    if (p.op == QUANTIZE || p.op == DYNAMIC_QUANTIZE) {
        Buffer& out = add(stored(p.quantized, p.last) * lines);
        c.job.out = rows(out, p.last, stored(p.quantized, p.last), true);
        c.outputs.push_back(&out);
    } else if (p.op != CHOOSE_QPARAMS) {
        Buffer& out = add(n * size);
        c.job.out = rows(out, p.last, p.last, true);
        c.outputs.push_back(&out);
    }
    if (p.op == FAKE_QUANTIZE_LEARNED_BACKWARD) {
        Buffer& grad_scale = add(segments * (p.element == F64 ? 8 : 4));
        Buffer& grad_zero_point = add(segments * (p.element == F64 ? 8 : 4));
        const int64_t units = sum_units(p.view);
        c.job.grad_scale = grad_scale.data.get();
        c.job.grad_zero_point = grad_zero_point.data.get();
        c.job.sums = reinterpret_cast<double*>(add(units > 1 ? units * segments * 16 : 0).data.get());
        c.outputs.push_back(&grad_scale);
        c.outputs.push_back(&grad_zero_point);
    }
    c.job.stream = upto(1);
}

std::vector<std::vector<char>> run(Case& c, const Kernels* k, int64_t threads, bool fused) {
    for (Buffer* out : c.outputs) out->poison();
    const View& v = c.job.p.view;
    auto each = [&](void (*body)(const Job&, int64_t, int64_t)) {
        auto part = [&](int64_t i, int64_t of) { body(c.job, i, of); };
        share_out(threads, part);
    };
    if (c.job.p.op == FAKE_QUANTIZE_LEARNED_BACKWARD) {
        each(k->learn);
        if (sum_units(v) > 1) each(k->total);
    } else if (!c.dynamic) {
        each(k->elementwise);
    } else if (fused) {
        each(k->fused_range);
    } else {
        for (int64_t i = 0; i < v.segments(); ++i) {
            c.job.keys[i] = c.job.p.asymmetric ? INT64_MIN : 0;
            c.job.keys[v.segments() + i] = INT64_MAX;
        }
        each(k->reduce);
        each(k->finish);
        if (c.job.p.op != CHOOSE_QPARAMS) each(k->elementwise);
    }
    std::vector<std::vector<char>> results;
    for (Buffer* out : c.outputs) results.push_back(out->copy());
    return results;
}

void linear(const std::vector<Isa>& all) {
    const int64_t m = upto(20), n = upto(7) ? upto(70) : upto(2200), element = upto(3), size = bytes_of(int(element));
    const bool packs = upto(1), is_unsigned = upto(1);
    const int64_t more = 36 * upto(1);
    const int64_t group = packs && upto(1) ? (upto(1) ? 32 : 16 * upto(8) + more) : 0;
    const int64_t k = group ? group * upto(40) : upto(9) ? upto(5000) : 65530 + upto(10);
    Buffer act(m * k), weight(n * (packs ? packed(k) : k)), scale(n * 4), sums(n * 4), acc(m * n * 4), unpacked(n * k);
    Buffer first(m * n * size), out(m * n * size), factor(group ? n * (k / group) : 0), prepared(prepared_bytes(m, k));
    for (int64_t i = 0; i < factor.size; ++i) {  // the low four bits count
        const int64_t low = 1 + upto(14);
        factor.data[i] = char(low + 16 * upto(15));
    }
    Epilogue e{};
    e.m = m, e.n = n, e.k = k, e.element = int(element);
    e.activation = int(upto(ACTIVATION_COUNT - 1));
    const int64_t pitch = n + upto(3);
    Buffer residual(m * pitch * size), zero_points(m * 4);
    e.residual = upto(1) ? residual.data.get() : nullptr, e.residual_pitch = pitch;
    e.scale_w = upto(1) ? scale.data.get() : nullptr;
    e.scale_a_code = e.scale_w_code = e.bias_code = F32;
    e.scale_a_number = 0.5, e.scale_w_number = 0.25;
    auto zero_point = [&] { return int32_t(upto(255)) - (is_unsigned ? 0 : 128); };
    e.zero_point_number = upto(1) ? zero_point() : 0;
    if (upto(1)) {
        e.zero_point = reinterpret_cast<int32_t*>(zero_points.data.get());
        for (int64_t i = 0; i < m; ++i) const_cast<int32_t*>(e.zero_point)[i] = zero_point();
    }
    Dot dot{};
    dot.a = act.data.get(), dot.a_unsigned = is_unsigned, dot.a_pitch = k;
    dot.w = weight.data.get(), dot.w_packed = packs, dot.w_pitch = packs ? packed(k) : k;
    if (group) dot.factor = reinterpret_cast<uint8_t*>(factor.data.get()), dot.group = group, dot.factor_pitch = k / group;
    dot.prepared = prepared.data.get();
    int32_t* weight_sums = reinterpret_cast<int32_t*>(sums.data.get());
    std::vector<char> finished;
    for (size_t i = 0; i < all.size(); ++i) {
        const LinearKernels& table = *all[i].linears;
        const int64_t threads = 1 + upto(2), parts = 1 + upto(9);
        e.weight_sum = i && upto(1) ? weight_sums : nullptr;
        e.out = i ? out.data.get() : first.data.get();
        auto part = [&](int64_t j, int64_t of) { table.multiply(e, dot, j, of); };
        if (m * n > 0) {
            table.prepare(e, dot);
            share_out(threads, parts, part);
        }
        if (i && memcmp(first.data.get(), out.data.get(), first.size)) {
            printf("linear %ld %ld %ld group %ld differs on %s\n", long(m), long(n), long(k), long(group), all[i].name);
            exit(1);
        }
        auto adding = [&](int64_t j, int64_t of) { table.weight_sums(dot, n, k, weight_sums, j, of); };
        share_out(threads, adding);
        auto expanding = [&](int64_t j, int64_t of) {
            table.unpack(dot, n, k, reinterpret_cast<int8_t*>(unpacked.data.get()), j, of);
        };
        if (packs) share_out(threads, expanding);
        auto finishing = [&](int64_t j, int64_t of) {
            table.epilogue(e, reinterpret_cast<int32_t*>(acc.data.get()), j, of);
        };
        e.out = out.data.get(), e.weight_sum = weight_sums;
        if (m * n > 0) share_out(threads, finishing);
        if (i == 0) finished = out.copy();
        if (finished != out.copy()) {
            printf("epilogue %ld %ld of element %ld differs on %s\n", long(m), long(n), long(element), all[i].name);
            exit(1);
        }
    }
    note(first.data.get(), m * n > 0 ? first.size : 0);
    note(finished.data(), m * n > 0 ? finished.size() : 0);
    note(sums.data.get(), sums.size);
    if (packs) note(unpacked.data.get(), unpacked.size);
}

void weight_only(const std::vector<Isa>& all) {
    const int kinds[] = {S8, S4, U4};
    const int element = int(upto(3)), weight = kinds[upto(2)];
    const int64_t m = 1 + upto(18), n = 1 + (upto(7) ? upto(70) : upto(1200)), size = bytes_of(element);
    const int64_t wide = element == F64 ? 8 : 4;
    const int64_t group = upto(2) ? (upto(1) ? 32 * (1 + upto(4)) : 1 + upto(70)) : 0;
    const int64_t k = group ? group * upto(12) : upto(700), segments = group ? k / group : 1;
    Buffer x(m * k * size), w(n * (is_packed(weight) ? packed(k) : k)), scale(n * segments * 4), zero_point(n * segments * 4);
    Buffer prepared(m * ((k + 31) / 32 * 32) * wide), first(m * n * size), out(m * n * size), bias(n * 4);
    FloatWeights f{};
    f.x = x.data.get(), f.x_pitch = k, f.w = w.data.get(), f.weight = weight;
    f.w_pitch = is_packed(weight) ? packed(k) : k;
    f.scale = scale.data.get(), f.scale_code = F32, f.scale_pitch = f.zero_point_pitch = segments;
    f.zero_point = upto(1) ? reinterpret_cast<int32_t*>(zero_point.data.get()) : nullptr;
    f.group = group ? group : (k / 32 + 1) * 32, f.prepared = prepared.data.get();
    Epilogue e{};
    e.m = m, e.n = n, e.k = k, e.element = element, e.activation = int(upto(ACTIVATION_COUNT - 1));
    e.scale_a_number = e.scale_w_number = 1, e.bias = upto(1) ? bias.data.get() : nullptr, e.bias_code = F32;
    for (size_t i = 0; i < all.size(); ++i) {
        e.out = i ? out.data.get() : first.data.get();
        PlainFloats plain;
        all[i].linears->prepare_floats(e, f);
        auto part = [&](int64_t j, int64_t of) { all[i].linears->multiply_floats(e, f, j, of); };
        share_out(1 + upto(2), 1 + upto(9), part);
        if (i && memcmp(first.data.get(), out.data.get(), first.size)) {
            printf("weight-only %ld %ld %ld group %ld differs on %s\n", long(m), long(n), long(k), long(group), all[i].name);
            exit(1);
        }
    }
    note(first.data.get(), first.size);
}

// A norm or a gated product, as floats or quantized: inputs in spaced rows, gate and up side by side, empty rows.
void production(const std::vector<Isa>& all) {
    static const int64_t widths[] = {0, 1, 2, 3, 7, 31, 64, 129, 1000, 1024, 1025, 8191, 8193, 20000};
    Production p{};
    p.gated = upto(1), p.quantizes = upto(2), p.rows = upto(12), p.d = widths[upto(13)];
    p.element = int(upto(3)), p.style = int(upto(STYLE_COUNT - 1)), p.activation = int(upto(ACTIVATION_COUNT - 1));
    p.eps = upto(1) ? 1e-6 : 0;
    const bool halves = p.gated && upto(1), adds = !p.gated && upto(1);
    const int64_t size = bytes_of(p.element), pitch = (halves ? 2 * p.d : p.d) + upto(1) * 5, n = p.rows * p.d;
    const int64_t spaced = p.rows ? ((p.rows - 1) * pitch + (halves ? 2 * p.d : p.d)) * size : 0;
    Buffer x(spaced), other(halves ? 0 : spaced), sum(adds ? n * size : 0);
    p.weight_code = int(upto(3)), p.bias_code = int(upto(3));
    Buffer weight(p.d * bytes_of(p.weight_code)), bias(p.d * bytes_of(p.bias_code));
    p.x = rows(x, p.d, pitch, pitch == p.d);
    p.other = halves ? p.x : rows(other, p.d, pitch, pitch == p.d);
    if (halves) p.other.data += p.d * size;
    p.weight = !p.gated && upto(2) ? weight.data.get() : nullptr;
    p.bias = !p.gated && upto(1) ? bias.data.get() : nullptr;
    p.sum_out = adds ? sum.data.get() : nullptr;
    Job& job = p.quantization;
    Problem& q = job.p;
    q.op = upto(1) ? DYNAMIC_QUANTIZE : QUANTIZE, q.element = p.element, q.quantized = S8 + int(upto(3)), q.last = p.d;
    q.scale_element = p.element == F64 ? F64 : upto(1) ? F32 : p.element;
    const int low[] = {-128, 0, -8, 0}, high[] = {127, 255, 7, 15};
    q.q_min = low[q.quantized - S8], q.q_max = high[q.quantized - S8];
    q.asymmetric = upto(1), q.include_zero = upto(1), q.reciprocal = upto(2) == 0;
    const bool dynamic = q.op == DYNAMIC_QUANTIZE;
    q.view = dynamic ? View{1, p.rows, p.d, 1} : View{1, 1, n, 1};
    const int64_t unit = stored(q.quantized, p.d);
    Buffer out(p.quantizes ? p.rows * unit : n * size), scale(p.rows * bytes_of(q.scale_element)), zero_point(p.rows * 4);
    p.out = out.data.get();
    job.out = rows(out, p.d, unit, true);
    if (dynamic) {
        job.scale_out = scale.data.get();
        job.zero_point_out = q.asymmetric ? reinterpret_cast<int32_t*>(zero_point.data.get()) : nullptr;
    } else {
        job.scale_number = 0.37, job.zero_point_number = int32_t(upto(300)) - 150;
    }
    std::vector<std::vector<char>> expected;
    for (size_t i = 0; i < all.size(); ++i) {
        for (Buffer* written : {&out, &scale, &zero_point, &sum}) written->poison();
        auto part = [&](int64_t j, int64_t of) { all[i].kernels->produce(p, j, of); };
        share_out(i ? 1 + upto(3) : 1, part);
        std::vector<std::vector<char>> found = {out.copy(), scale.copy(), zero_point.copy(), sum.copy()};
        if (i == 0) expected = found;
        if (found != expected) {
            printf("production gated %d style %d activation %d element %d, %ld x %ld differs on %s\n", p.gated, p.style,
                   p.activation, p.element, long(p.rows), long(p.d), all[i].name);
            exit(1);
        }
    }
    for (const std::vector<char>& each : expected) note(each.data(), each.size());
}

// What GPTQ does to the columns of a weight.
void columns(const std::vector<Isa>& all) {
    Columns c{};
    c.count = upto(40), c.rows = upto(140), c.pitch = c.count + upto(3), c.low = -8, c.high = 7;
    const int64_t groups = 1 + upto(3), n = c.count * c.rows;
    auto floats = [&](int64_t count) {
        std::vector<float> made(count);
        for (float& x : made) x = float(int64_t(engine() % 2001) - 1000) / 256;
        return made;
    };
    const std::vector<float> values = floats(n), scale = floats(groups * c.rows), before = floats(n);
    const std::vector<float> factor = floats(c.count ? (c.count - 1) * c.pitch + c.count : 0);
    std::vector<int64_t> group_of(c.count);
    for (int64_t& group : group_of) group = upto(groups - 1);
    c.values = values.data(), c.factor = factor.data(), c.scale = scale.data(), c.groups = group_of.data();
    std::vector<float> first, handed;
    for (size_t i = 0; i < all.size(); ++i) {
        std::vector<float> integers = before, passed(n);
        c.integers = integers.data(), c.passed = passed.data();
        all[i].kernels->round_columns(c);
        if (i == 0) first = integers, handed = passed;
        if (n && (memcmp(first.data(), integers.data(), n * 4) || memcmp(handed.data(), passed.data(), n * 4))) {
            printf("columns %ld x %ld differ on %s\n", long(c.count), long(c.rows), all[i].name);
            exit(1);
        }
    }
    note(first), note(handed);
}

}  // namespace

int main(int argc, char** argv) {
    const long rounds = argc > 1 ? atol(argv[1]) : 2000;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
    const std::vector<Isa> all = isas();
    for (long round = 0; round < rounds; ++round) {
        // Anew, since each instruction set draws how it is run.
        engine.seed(seed * 1000003 + uint64_t(round));
        if (round % 8 == 0) linear(all);
        if (round % 8 == 4) weight_only(all);
        if (round % 8 == 2) production(all);
        if (round % 8 == 6) columns(all);
        engine.seed(~(seed * 1000003 + uint64_t(round)));
        Case c;
        build(c);
        const Problem& p = c.job.p;
        const bool fusable = p.view.numel() == 0 || (p.view.repeat == 1 && (p.view.inner > 1 || p.view.run >= p.last || p.last / p.view.run <= BLOCK_SEGMENTS));
        const auto expected = run(c, all[0].kernels, 1, false);
        for (const std::vector<char>& each : expected) note(each.data(), each.size());
        for (const Isa& isa : all)
            for (int64_t threads : {int64_t(1), 1 + upto(4)})
                for (bool fused : {false, true})
                    if ((!fused || (c.dynamic && fusable)) && run(c, isa.kernels, threads, fused) != expected) {
                        printf("round %ld: op %d element %d quantized %d view %ld %ld %ld %ld last %ld differs on %s, %ld threads%s\n",
                               round, p.op, p.element, p.quantized, long(p.view.repeat), long(p.view.rows), long(p.view.run),
                               long(p.view.inner), long(p.last), isa.name, long(threads), fused ? ", fused" : "");
                        return 1;
                    }
    }
    printf("%ld rounds on %zu instruction sets: the same bytes everywhere\n", rounds, all.size());
    printf("digest %016llx\n", (unsigned long long)digest);
    return 0;
}
