"""The compiled kernels of the CPU backend. Private: baracuda.backends.cpu checks what goes in here."""

def isa() -> str:
    """The instruction set in use."""

def isas() -> list[str]:
    """The instruction sets of this machine, least first."""

def use_isa(name: str) -> None:
    """Use another instruction set from now on."""

def threads() -> str:
    """Whose threads the kernels share their work among."""

def has_exact_int8_dot() -> bool:
    """Whether the processor sums 8-bit products in 32 bits at once."""

#: (scale_a address, code, number, zero point address, number, scale_w address, code, number, bias address, code,
#: residual address, pitch)
Scales = tuple[int, int, float, int, int, int, int, float, int, int, int, int]

class Plan:
    """A problem as integers. A pitch of -1 stands for dense rows, an address of 0 for the number beside it."""

    def __init__(
        self,
        op: int,
        element: int,
        quantized: int,
        scale_element: int,
        q_min: int,
        q_max: int,
        asymmetric: bool,
        include_zero: bool,
        reciprocal: bool,
        repeat: int,
        rows: int,
        run: int,
        inner: int,
        last: int,
        scale_length: int,
    ) -> None: ...
    def workspace(self) -> int: ...
    def run(
        self,
        x: int,
        x_pitch: int,
        dy: int,
        dy_pitch: int,
        scale: int,
        scale_code: int,
        scale_pitch: int,
        scale_number: float,
        zero_point: int,
        zero_point_pitch: int,
        zero_point_number: int,
        out: int,
        threads: int,
        /,
    ) -> None: ...
    def run_learned(
        self,
        x: int,
        x_pitch: int,
        dy: int,
        dy_pitch: int,
        scale: int,
        scale_code: int,
        scale_pitch: int,
        scale_number: float,
        zero_point: int,
        zero_point_pitch: int,
        zero_point_number: int,
        out: int,
        grad_scale: int,
        grad_zero_point: int,
        workspace: int,
        threads: int,
        /,
    ) -> None: ...
    def run_dynamic(
        self, x: int, x_pitch: int, scale_out: int, zero_point_out: int, out: int, workspace: int, threads: int, /
    ) -> None: ...

class Producer:
    """A norm of rows, or a product with what a nonlinearity makes of a gate, with floats as a result or quantized.

    `quantization` is the plan of the result where it is quantized. `adds`: a norm of the sum of two inputs. `halves`:
    gate and up side by side in one row. The rest describes the op's row: how many operands it has, and where the sum,
    the scale and the zero point are, or -1; the output is the last.
    """

    def __init__(
        self,
        gated: bool,
        rows: int,
        d: int,
        element: int,
        style: int,
        activation: int,
        eps: float,
        quantization: Plan | None,
        adds: bool,
        halves: bool,
        count: int,
        sum_at: int,
        scale_at: int,
        zero_point_at: int,
    ) -> None: ...
    def launch(self, operands: tuple[object, ...], workspace: object, /) -> None: ...

class Linear:
    """A linear of an [m, k] and an [n, k] matrix: its parts, and the whole of it in one call.

    `group` is 0, or the number of s4 weights along k that share an integer factor (1 to 15); the factors are uint8
    [n, k / group]. `quantization` is the plan of the activations where they come as floats.
    """

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        element: int,
        quantized: int,
        weight: int,
        activation: int,
        group: int = 0,
        quantization: Plan | None = None,
    ) -> None: ...
    def workspace(self) -> int:
        """The bytes that `launch` needs."""

    def weight_sums(
        self, weight: int, weight_pitch: int, factor: int, factor_pitch: int, out: int, threads: int, /
    ) -> None: ...
    def unpack(
        self, weight: int, weight_pitch: int, factor: int, factor_pitch: int, out: int, threads: int, /
    ) -> None: ...
    def shift(self, act: int, act_pitch: int, out: int, threads: int, /) -> None: ...
    def epilogue(
        self, acc: int, scales: Scales, weight_sum: int, shift: int, out: int, first: int, rows: int, threads: int, /
    ) -> None: ...
    def launch(self, operands: tuple[object, ...], workspace: object, /) -> None:
        """From the operands of the op's row; without a workspace it uses memory of its thread."""

class WeightOnlyLinear:
    """A linear of [m, k] floats and an [n, k] integer weight, with a scale and a zero point for each `group` of k.

    The order of the sums is fixed: the bits of a row depend on neither the other rows, the threads nor the processor.
    """

    def __init__(self, m: int, n: int, k: int, element: int, weight: int, activation: int, group: int = 0) -> None: ...
    def workspace(self) -> int: ...
    def launch(self, operands: tuple[object, ...], workspace: object, /) -> None:
        """From the operands of the op's row; without a workspace it uses memory of its thread."""

def round_columns(
    count: int,
    rows: int,
    pitch: int,
    low: float,
    high: float,
    values: int,
    factor: int,
    scale: int,
    groups: int,
    integers: int,
    passed: int,
    /,
) -> None:
    """Round `count` columns of a weight one after the other, all f32 `[count, rows]`: see `Columns` in csrc/job.hpp."""

def gram(tokens: int, columns: int, x: int, packed: int, room: int, made: int, /) -> None:
    """x.T @ x of bf16 tokens `[tokens, columns]`, on and below its diagonal, in f32; `packed` has `room` elements."""

def has_gram() -> bool:
    """Whether this processor has the instructions for `gram`."""

def attend(operands: tuple[object, ...], causal: bool, scale: float, /) -> None:
    """Attention of query, key, value and mask (or None) into an output: see csrc/attention.cpp."""
