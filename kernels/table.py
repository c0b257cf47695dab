"""The device table: one block of int64 words that tells a launch everything but the numbers it changes.

    header | group rows | grad addresses | tensor rows | chunks | strided layouts

What may change from step to step comes first (header, groups, grads), so that it is uploaded alone. All
tensors of the optimizer are in the table; one without a gradient has the address 0 there and is passed over.

A *chunk* is a run of elements of one tensor, ``header[CHUNK_SIZE]`` long: the unit of work of a program.
A chunk's word holds the tensor's number in the upper and the chunk's number within it in the lower 32 bits.
"""

import triton
import triton.language as tl

# Header.
N_TENSORS = tl.constexpr(0)
N_CHUNKS = tl.constexpr(1)
CHUNK_SIZE = tl.constexpr(2)
GRADS = tl.constexpr(3)  # word at which the grad addresses start
ROWS = tl.constexpr(4)  # ... the tensor rows
CHUNKS = tl.constexpr(5)  # ... the chunks
UNSCALE = tl.constexpr(6)  # 1: gradients carry the loss scale
ADVANCE = tl.constexpr(7)  # loss scale: 0 stays, 1 advances with this step, 2 records found_inf for a later update
SKIP_NONFINITE = tl.constexpr(8)  # 1: a non-finite gradient skips the step
SKIP_NORM = tl.constexpr(9)  # float64: a larger norm skips the step
GRAD_SCALE = tl.constexpr(10)  # address of an outer scaler's float32 scale, or 0
FOUND_INF = tl.constexpr(11)  # address of an outer scaler's float32 flag, or 0
N_SUMS = tl.constexpr(12)  # how many numbers add up to the square of the norm: the partials, or what ranks agreed on
N_SLOTS = tl.constexpr(13)  # of `sums_kernel`; 0 where no ranks agree, and partials are of scaled gradients
FLAT = tl.constexpr(15)  # the layout of flat memory: no dimensions
HEADER = tl.constexpr(16)  # words

# Group row: float64 but for the addresses and the seed.
LR = tl.constexpr(0)
LR_ADDRESS = tl.constexpr(1)  # address of a tensor lr, or 0
LR_IS_DOUBLE = tl.constexpr(2)  # 1: that tensor is float64, 0: float32
MAX_NORM = tl.constexpr(3)  # inf: no clipping
SIGN = tl.constexpr(4)  # -1 to maximize
HYPER = tl.constexpr(5)  # the rule's own numbers follow
SEED = tl.constexpr(15)  # int64, of stochastic rounding
GROUP = tl.constexpr(16)  # words

# Tensor row.
PARAM = tl.constexpr(0)
STEP = tl.constexpr(1)  # address of the parameter's float32 count of applied steps, or 0
STATE = tl.constexpr(2)  # up to three state tensors, then the master copy if there is one
NUMEL = tl.constexpr(6)
KIND = tl.constexpr(7)  # variant | grad kind << 16 | group << 32
LAYOUT = tl.constexpr(8)  # word at which the layout starts
STREAM = tl.constexpr(9)  # of random numbers: the parameter's place in the optimizer | its shard << 48
SHARE = tl.constexpr(10)  # slot << 1 | whether its sum counts
ROW = tl.constexpr(11)  # words

# How a parameter is kept.
ROUNDED = tl.constexpr(0)  # stored once, rounded to nearest
STOCHASTIC = tl.constexpr(1)  # ... stochastically
MASTER = tl.constexpr(2)  # a copy in the compute dtype is the truth, the parameter its rounding

# Layout: the number of dimensions, then (size, grad stride, param stride) of each, innermost first. None: flat memory.
DIM = tl.constexpr(3)  # words


@triton.jit
def as_float64(table):
    """The same words, seen as float64."""
    return table.to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def find_chunk(table, chunk):
    """Where a chunk lies.

    Returns:
        The address of its tensor's row, its tensor's grad address (0: nothing to do), the chunk's first
        element (int64) and its number of elements (int32).
    """
    word = tl.load(table + tl.load(table + CHUNKS) + chunk)
    tensor = word >> 32
    row = table + tl.load(table + ROWS) + tensor * ROW
    grad = tl.load(table + tl.load(table + GRADS) + tensor)
    size = tl.load(table + CHUNK_SIZE)
    begin = (word & 0xFFFFFFFF) * size
    count = tl.minimum(tl.load(row + NUMEL) - begin, size).to(tl.int32)
    return row, grad, begin, count


@triton.jit
def positions(index, layout):
    """Offsets in elements of the logical (int64) ``index``, in the grad and in the param.

    ``layout`` is the address of a layout. State lies densely, in the order of ``index``.
    """
    in_grad = tl.zeros_like(index)
    in_param = in_grad
    for d in range(tl.load(layout).to(tl.int32)):
        dim = layout + 1 + d * DIM
        size = tl.load(dim)
        rest = (index.to(tl.uint64) // size.to(tl.uint64)).to(tl.int64)  # unsigned: shorter, in fewer registers
        index -= rest * size
        in_grad += index * tl.load(dim + 1)
        in_param += index * tl.load(dim + 2)
        index = rest
    return in_grad + index, in_param + index
