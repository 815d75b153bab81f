// From operands to the device. A kernel is compiled for the kinds of its arguments; a call finds the kernel for its
// own, puts addresses and numbers where that kernel expects its parameters, and launches it on torch's current stream.
#pragma once
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.hpp"
#include "tensor.hpp"

namespace baracuda {

// Where an argument comes from: an operand, and where that is None or was never meant, a place in the workspace.
struct Source {
    int operand = -1;
    int64_t offset = -1;
    uint32_t dtype = 0;
};

// The most matrices a kernel has copied for it.
constexpr size_t MOST_MAPS = 4;

// An argument of one call. Its kind is a dtype, or one of these.
constexpr uint32_t NOTHING = 0, NUMBER = 1;

struct Argument {
    uint32_t kind = NOTHING;
    uint64_t address = 0;
    PyObject* number = nullptr;
};

// Raised through Python: its error is set already.
struct PythonError {};

inline void refuse_if(bool wrong, const char* expected) {
    if (wrong) throw std::invalid_argument(expected);
}

// One parameter of a compiled kernel and what fills it. A number's parameter is 0 where a tensor came, and the other
// way round.
struct Parameter {
    enum Kind { CONSTANT, ADDRESS, I32, F32, F64, MAP } kind;
    int argument = 0;
    uint64_t constant = 0;
    int map = 0;
};

// A matrix as the copy engine is told of it; encoded anew when its address changes.
struct Matrix {
    int type, swizzle;
    uint64_t sizes[2], pitch;
    uint32_t box[2];
    uint64_t address = 0;
    TensorMap encoded{};
};

class Kernel {
    friend class Launcher;
    std::string name_;
    void* function_;
    unsigned programs_, threads_, shared_;
    bool early_;  // may come while the kernel before it still runs: it waits by itself
    std::vector<Parameter> parameters_;
    std::vector<Matrix> matrices_;

public:
    Kernel(std::string name, uint64_t function, unsigned programs, unsigned threads, unsigned shared, bool early)
        : name_(std::move(name)), function_(reinterpret_cast<void*>(function)), programs_(programs), threads_(threads),
          shared_(shared), early_(early) {}

    void constant(uint64_t bits) { add({Parameter::CONSTANT, 0, bits, 0}); }
    void address(int argument) { add({Parameter::ADDRESS, argument, 0, 0}); }

    void number(int argument, const std::string& form) {
        const auto kind = form == "i32" ? Parameter::I32 : form == "f32" ? Parameter::F32 : Parameter::F64;
        if (kind == Parameter::F64 && form != "f64")
            throw std::invalid_argument("expected i32, f32 or f64, got " + form);
        add({kind, argument, 0, 0});
    }

    void matrix(int argument, int type, int swizzle, int64_t bytes, int64_t rows, int64_t columns, uint32_t box_rows,
                uint32_t box_columns) {
        refuse_if(matrices_.size() == MOST_MAPS, "expected at most 4 matrices");
        const uint64_t pitch = uint64_t(columns * bytes);
        Matrix matrix{type, swizzle, {uint64_t(columns), uint64_t(rows)}, pitch, {box_columns, box_rows}};
        add({Parameter::MAP, argument, 0, int(matrices_.size())});
        matrices_.push_back(matrix);
    }

    // What fills each parameter, in words.
    std::vector<std::string> parameters() const {
        const char* const names[] = {"constant", "address", "i32", "f32", "f64", "matrix"};
        std::vector<std::string> words;
        for (const Parameter& parameter : parameters_) words.push_back(names[parameter.kind]);
        return words;
    }

private:
    void add(Parameter parameter) {
        refuse_if(parameters_.size() == 2 * MOST, "expected at most 48 parameters");
        refuse_if(parameter.argument < 0 || parameter.argument >= MOST, "expected an argument's index");
        parameters_.push_back(parameter);
    }
};

class Launcher {
    struct Known {
        std::vector<uint32_t> kinds;
        std::shared_ptr<Kernel> kernel;
    };
    std::shared_ptr<Driver> driver_;
    int index_, device_ = 0;
    std::vector<Source> sources_;
    uint32_t vectors_;  // a bit for each argument whose address must be divisible for wide accesses
    uint64_t alignment_;
    std::vector<Known> known_;

public:
    Launcher(std::shared_ptr<Driver> driver, int index, std::vector<Source> sources, uint32_t vectors,
             uint64_t alignment)
        : driver_(std::move(driver)), index_(index), sources_(std::move(sources)), vectors_(vectors),
          alignment_(alignment) {
        refuse_if(sources_.size() > size_t(MOST), "expected at most 24 arguments");
        refuse_if(alignment_ == 0, "expected an alignment");
        driver_->require(driver_->device_get(&device_, index), "cuDeviceGet");
    }

    // The kernel for arguments of the kinds, and the alignment, that these operands have.
    void add(PyObject* operands, PyObject* workspace, std::shared_ptr<Kernel> kernel) {
        for (const Parameter& parameter : kernel->parameters_)
            refuse_if(parameter.kind != Parameter::CONSTANT && size_t(parameter.argument) >= sources_.size(),
                      "expected parameters that name one of the arguments");
        Argument arguments[MOST];
        const uint32_t aligned = gather(operands, workspace, arguments);
        Known known{{aligned}, std::move(kernel)};
        for (size_t i = 0; i < sources_.size(); ++i) known.kinds.push_back(arguments[i].kind);
        known_.push_back(std::move(known));
    }

    // False where no kernel is known for these operands, or the current device is another one.
    bool launch(PyObject* operands, PyObject* workspace) {
        Argument arguments[MOST];
        const uint32_t aligned = gather(operands, workspace, arguments);
        const std::shared_ptr<Kernel> kernel = find(arguments, aligned);
        int current = -1;
        if (!kernel || driver_->context_device(&current) || current != device_) return false;
        void* stream = nullptr;
        if (torch.exchange->current_stream(CUDA, index_, &stream)) throw PythonError();
        uint64_t values[2 * MOST];
        TensorMap maps[MOST_MAPS];
        void* parameters[2 * MOST];
        fill(*kernel, arguments, values, maps, parameters);
        LaunchAttribute early{LaunchAttribute::PROGRAMMATIC_STREAM_SERIALIZATION, 0, {1}};
        const LaunchConfig config{{kernel->programs_, 1, 1}, {kernel->threads_, 1, 1}, kernel->shared_, stream, &early,
                                  kernel->early_};
        int result;
        // A full queue makes the driver wait: other threads must not.
        Py_BEGIN_ALLOW_THREADS;
        result = driver_->launch_kernel(&config, kernel->function_, parameters, nullptr);
        Py_END_ALLOW_THREADS;
        if (result)
            driver_->require(result, "launching " + kernel->name_ + " (" + std::to_string(kernel->programs_) + " x " +
                                         std::to_string(kernel->threads_) + " threads, " +
                                         std::to_string(kernel->shared_) + " bytes of shared memory)");
        return true;
    }

    // A thread that has not used the device yet has no context; torch's is the primary one.
    void use_context() const {
        int current;
        if (driver_->context_device(&current) == 0) return;
        void* context = nullptr;
        driver_->require(driver_->primary_context_retain(&context, device_), "cuDevicePrimaryCtxRetain");
        driver_->require(driver_->context_set_current(context), "cuCtxSetCurrent");
    }

private:
    uint32_t gather(PyObject* operands, PyObject* workspace, Argument* arguments) const {
        const Py_ssize_t count = PyTuple_GET_SIZE(operands);
        uint64_t addresses = 0, base = 0;
        for (size_t i = 0; i < sources_.size(); ++i) {
            const Source& source = sources_[i];
            const bool given = source.operand >= 0 && source.operand < count;
            PyObject* value = given ? PyTuple_GET_ITEM(operands, source.operand) : Py_None;
            if (value != Py_None) {
                arguments[i] = argument(value);
            } else if (source.offset >= 0) {
                if (!base) base = argument(workspace).address;
                arguments[i] = {source.dtype, base + uint64_t(source.offset), nullptr};
            }
            if (vectors_ >> i & 1) addresses |= arguments[i].address;
        }
        return addresses % alignment_ == 0;
    }

    static Argument argument(PyObject* value) {
        if (!torch.is_plain(value)) {
            if (PyFloat_Check(value) || PyLong_Check(value)) return {NUMBER, 0, value};
            const int is_tensor = PyObject_IsInstance(value, torch.tensor);
            if (is_tensor < 0) throw PythonError();
            if (!is_tensor) return {NUMBER, 0, value};
        }
        DLTensor tensor;
        if (!torch.read(value, tensor)) throw PythonError();
        return {word(tensor.dtype), address_of(tensor), nullptr};
    }

    std::shared_ptr<Kernel> find(const Argument* arguments, uint32_t aligned) const {
        for (const Known& known : known_) {
            bool same = known.kinds[0] == aligned;
            for (size_t i = 0; same && i < sources_.size(); ++i) same = known.kinds[i + 1] == arguments[i].kind;
            if (same) return known.kernel;
        }
        return nullptr;
    }

    void fill(Kernel& kernel, const Argument* arguments, uint64_t* values, TensorMap* maps, void** parameters) const {
        for (size_t i = 0; i < kernel.parameters_.size(); ++i) {
            const Parameter& parameter = kernel.parameters_[i];
            const Argument& argument = arguments[parameter.argument];
            parameters[i] = values + i;
            if (parameter.kind == Parameter::CONSTANT) {
                values[i] = parameter.constant;
            } else if (parameter.kind == Parameter::ADDRESS) {
                values[i] = argument.address;
            } else if (parameter.kind == Parameter::MAP) {
                maps[parameter.map] = encoded(kernel.matrices_[parameter.map], argument.address);
                parameters[i] = maps + parameter.map;
            } else {
                values[i] = argument.number ? bits(parameter.kind, argument.number) : 0;
            }
        }
    }

    static uint64_t bits(Parameter::Kind kind, PyObject* number) {
        uint64_t result = 0;
        if (kind == Parameter::I32) {
            PyObject* integer = PyNumber_Index(number);
            if (!integer) throw PythonError();
            result = uint32_t(PyLong_AsLong(integer));
            Py_DECREF(integer);
        } else {
            const double wide = PyFloat_AsDouble(number);
            const float narrow = float(wide);
            if (kind == Parameter::F64) std::memcpy(&result, &wide, sizeof wide);
            else std::memcpy(&result, &narrow, sizeof narrow);
        }
        if (PyErr_Occurred()) throw PythonError();
        return result;
    }

    const TensorMap& encoded(Matrix& matrix, uint64_t address) const {
        if (matrix.address != address) {
            if (!driver_->encode_tiled)
                throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled; update it");
            matrix.address = 0;  // until it is encoded
            const uint32_t steps[2] = {1, 1};
            constexpr int NOT_INTERLEAVED = 0, PROMOTE_TO_128_BYTES = 2, ZEROS_OUTSIDE = 0;
            const int result = driver_->encode_tiled(&matrix.encoded, matrix.type, 2, reinterpret_cast<void*>(address),
                                                     matrix.sizes, &matrix.pitch, matrix.box, steps, NOT_INTERLEAVED,
                                                     matrix.swizzle, PROMOTE_TO_128_BYTES, ZEROS_OUTSIDE);
            driver_->require(result, "cuTensorMapEncodeTiled");
            matrix.address = address;
        }
        return matrix.encoded;
    }
};

}  // namespace baracuda
