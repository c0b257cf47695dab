"""The kernels: loads, stores and control flow around norm, scale and rules.

``step_kernel`` is the whole step in one cooperative launch:

1. every gradient is read once: one float64 partial sum of squares per chunk, inf or NaN where a gradient is
2. grid barrier
3. every program adds up the partials in the same order: norm, finite?, clip coefficients
4. unless the step is skipped, all chunks are updated, in the opposite order: the gradients read last are still
   in the L2 cache
5. the last program out writes what the launch changes besides: loss scale, step counters, outcome

``statistics_kernel`` and ``apply_kernel`` are the two halves, for where a cooperative launch is not to be had, or
where ranks or devices have to agree in between: on what ``sums_kernel`` makes of the partials. ``apply_kernel`` alone
is the step when there is nothing to wait for.
"""

import triton
import triton.language as tl

from . import scale, table
from .grid import grid_barrier, is_last_out
from .norm import add_up, chunk_sum
from .rounding import noise, round_stochastically
from .table import as_float64, find_chunk, positions

# The outcome of a step: a device vector of float64.
GRAD_NORM = tl.constexpr(0)
FOUND_INF = tl.constexpr(1)
SKIPPED = tl.constexpr(2)
SKIPPED_STEPS = tl.constexpr(3)
CONSECUTIVE_SKIPS = tl.constexpr(4)
PENDING_INF = tl.constexpr(5)  # an inf that unscaling in place has seen since the last step
OUTCOME = tl.constexpr(8)  # words


@triton.jit
def total_inv_scale(words, loss_scale):
    """float64 factor that unscales the gradients: of the own loss scale and of an outer scaler's."""
    inv_scale = tl.full((), 1.0, tl.float64)
    if tl.load(words + table.UNSCALE) != 0:
        inv_scale = 1 / tl.load(loss_scale + scale.SCALE)
    address = tl.load(words + table.GRAD_SCALE)
    if address != 0:
        inv_scale = inv_scale / tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return inv_scale


@triton.jit
def gather_statistics(words, partials, inv_scale, GRADS: tl.constexpr, BLOCK: tl.constexpr):
    """Phase 1: write the partial of every chunk, 0 for one without a gradient."""
    n_chunks = tl.load(words + table.N_CHUNKS).to(tl.int32)
    for chunk in range(tl.program_id(0), n_chunks, tl.num_programs(0)):
        row, grad, begin, count = find_chunk(words, chunk)
        partial = tl.full((), 0.0, tl.float64)
        if grad != 0:
            kind = (tl.load(row + table.KIND) >> 16) & 0xFFFF
            layout = words + tl.load(row + table.LAYOUT)
            for k in tl.static_range(len(GRADS)):
                if kind == k:
                    G: tl.constexpr = GRADS[k][0]
                    C: tl.constexpr = GRADS[k][1]
                    LANES: tl.constexpr = BLOCK * 32 // G.primitive_bitwidth  # 16 bytes per thread
                    partial = chunk_sum(grad, begin, count, layout, inv_scale, G, C, LANES, BLOCK // 4)
        tl.store(partials + chunk, partial)


@triton.jit
def decide(words, partials, outcome, inv_scale, BLOCK: tl.constexpr):
    """Phase 3: ``(norm, skip)``, the same in every program. One writes down what was found."""
    total = add_up(partials, tl.load(words + table.N_SUMS).to(tl.int32), BLOCK)
    norm = tl.sqrt(total) * tl.where(tl.load(words + table.N_SLOTS) == 0, inv_scale, 1.0)
    found_inf = ((total < float("inf")) == 0) | was_found(words, outcome)
    skip = found_inf & (tl.load(words + table.SKIP_NONFINITE) != 0)
    skip = skip | (norm > tl.load(as_float64(words) + table.SKIP_NORM))
    report(outcome, norm, found_inf, skip)
    return norm, skip


@triton.jit
def was_found(words, outcome):
    """Whether an inf or NaN was seen before this launch: by unscaling in place, or by an outer scaler."""
    found_inf = tl.load(outcome + PENDING_INF) != 0
    address = tl.load(words + table.FOUND_INF)
    if address != 0:
        found_inf = found_inf | (tl.load(address.to(tl.pointer_type(tl.float32))) != 0)
    return found_inf


@triton.jit
def report(outcome, norm, found_inf, skip):
    """Write the outcome, from one program; at once, so that nobody carries it in registers through phase 4."""
    if tl.program_id(0) == 0:
        tl.store(outcome + GRAD_NORM, norm)
        tl.store(outcome + FOUND_INF, tl.where(found_inf, 1.0, 0.0))
        tl.store(outcome + SKIPPED, tl.where(skip, 1.0, 0.0))


@triton.jit
def grad_factors(group, norm, inv_scale, C: tl.constexpr):
    """What a gradient is multiplied by, one after the other: unscaled, clipped, negated to maximize.

    Two factors, since their product may be subnormal or beyond the range of ``C``; the second is 1 otherwise.
    """
    max_norm = tl.load(group + table.MAX_NORM)
    coefficient = tl.minimum(max_norm / (norm + 1e-6), 1.0, propagate_nan=tl.PropagateNan.ALL)
    coefficient = tl.where(max_norm < float("inf"), coefficient, 1.0)
    factor = coefficient * inv_scale * tl.load(group + table.SIGN)
    size = tl.abs(factor)
    rescue = tl.where(size < 2.0**-100, 2.0**-100, tl.where(size > 2.0**100, 2.0**100, 1.0))
    return (factor / rescue).to(C), rescue.to(C)


@triton.jit
def learning_rate(group):
    """The group's lr, float64: from its row, or live from the tensor it names."""
    lr = tl.load(group + table.LR)
    words = group.to(tl.pointer_type(tl.int64), bitcast=True)
    address = tl.load(words + table.LR_ADDRESS)
    if address != 0:
        if tl.load(words + table.LR_IS_DOUBLE) != 0:
            lr = tl.load(address.to(tl.pointer_type(tl.float64)))
        else:
            lr = tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    return lr


@triton.jit
def update_region(
    grad, param, states, master, begin, lo, hi, layout, factors, scalars, stream,
    UPDATE: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Update the elements ``begin + [lo, hi)``. ``WIDE`` as in :func:`norm.sum_region`."""
    lanes = tl.arange(0, BLOCK)
    for start in range(lo, hi, BLOCK):
        offsets = start + lanes
        mask = offsets < hi
        if WIDE:
            grads = tl.multiple_of(grad + begin, 16) + offsets
            params = tl.multiple_of(param + begin, 16) + offsets
            masters = tl.multiple_of(master + begin, 16) + offsets
        else:
            in_grad, in_param = positions(begin + offsets, layout)
            grads = grad + in_grad
            params = param + in_param
            masters = master + begin + offsets
        g = tl.load(grads, mask=mask, other=0.0).to(C) * factors[0] * factors[1]
        p = tl.load(masters if KEPT == table.MASTER else params, mask=mask, other=0.0).to(C)
        s = ()
        for k in tl.static_range(len(states)):
            state = states[k] + begin
            if WIDE:
                state = tl.multiple_of(state, 16)
            s = s + (tl.load(state + offsets, mask=mask, other=0.0),)
        p, s = UPDATE(p, g, s, scalars, C)
        if KEPT == table.STOCHASTIC:
            tl.store(params, round_stochastically(p, noise(stream, begin, offsets)), mask=mask)
        else:
            tl.store(params, p.to(param.dtype.element_ty), mask=mask)
        if KEPT == table.MASTER:
            tl.store(masters, p, mask=mask)
        for k in tl.static_range(len(states)):
            state = states[k] + begin
            if WIDE:
                state = tl.multiple_of(state, 16)
            tl.store(state + offsets, s[k], mask=mask)


@triton.jit
def update_chunk(
    words, row, address, begin, count, norm, inv_scale,
    SCALARS: tl.constexpr, UPDATE: tl.constexpr, VARIANTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of a tensor of the ``K``-th variant."""
    # Triton before 3.8 takes an element of a tuple for a constexpr only where it is declared as one.
    C: tl.constexpr = VARIANTS[K][2]
    KEPT: tl.constexpr = VARIANTS[K][4]
    LANES: tl.constexpr = BLOCK * 32 // C.primitive_bitwidth  # 16 bytes per thread
    NARROW: tl.constexpr = BLOCK // 4  # one element per thread
    group = as_float64(words) + table.HEADER + (tl.load(row + table.KIND) >> 32) * table.GROUP
    step = tl.full((), 1.0, tl.float64)
    counter = tl.load(row + table.STEP)
    if counter != 0:
        step += tl.load(counter.to(tl.pointer_type(tl.float32))).to(tl.float64)
    scalars = SCALARS(group + table.HYPER, learning_rate(group), step, C)
    factors = grad_factors(group, norm, inv_scale, C)
    seed = tl.load(group.to(tl.pointer_type(tl.int64), bitcast=True) + table.SEED)
    stream = (seed, tl.load(row + table.STREAM), step)

    grad = address.to(tl.pointer_type(VARIANTS[K][0]))
    param_address = tl.load(row + table.PARAM)
    param = param_address.to(tl.pointer_type(VARIANTS[K][1]))
    addresses = address | param_address
    states = ()
    N_STATES: tl.constexpr = VARIANTS[K][3]
    for k in tl.static_range(N_STATES):
        state_address = tl.load(row + table.STATE + k)
        addresses = addresses | state_address
        states = states + (state_address.to(tl.pointer_type(C)),)
    master = param
    if KEPT == table.MASTER:
        master_address = tl.load(row + table.STATE + N_STATES)
        addresses = addresses | master_address
        master = master_address.to(tl.pointer_type(C))

    layout = words + tl.load(row + table.LAYOUT)
    is_wide = (addresses % 16 == 0) & (tl.load(layout) == 0)
    whole = tl.where(is_wide, count // 8 * 8, 0)
    # The narrow rest first: what it alone needs is then out of the registers.
    update_region(
        grad, param, states, master, begin, whole, count, layout, factors, scalars, stream,
        UPDATE, C, KEPT, NARROW, False,
    )  # fmt: skip
    update_region(
        grad, param, states, master, begin, 0, whole, layout, factors, scalars, stream,
        UPDATE, C, KEPT, LANES, True,
    )  # fmt: skip


@triton.jit
def update(
    words, norm, inv_scale,
    SCALARS: tl.constexpr, UPDATE: tl.constexpr, VARIANTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Phase 4: update all chunks, last ones first."""
    n_chunks = tl.load(words + table.N_CHUNKS).to(tl.int32)
    for i in range(tl.program_id(0), n_chunks, tl.num_programs(0)):
        # Compiled code runs a loop with a negative run-time step zero times: count up, and reverse here.
        row, grad, begin, count = find_chunk(words, n_chunks - 1 - i)
        if grad != 0:
            variant = tl.load(row + table.KIND) & 0xFFFF
            for k in tl.static_range(len(VARIANTS)):
                if variant == k:
                    update_chunk(words, row, grad, begin, count, norm, inv_scale, SCALARS, UPDATE, VARIANTS, k, BLOCK)


@triton.jit
def count_steps(words, BLOCK: tl.constexpr):
    """Add one to the step counter of every parameter that has a gradient."""
    n_tensors = tl.load(words + table.N_TENSORS).to(tl.int32)
    grads = words + tl.load(words + table.GRADS)
    rows = words + tl.load(words + table.ROWS)
    for start in range(0, n_tensors, BLOCK):
        tensor = start + tl.arange(0, BLOCK)
        mask = tensor < n_tensors
        mask = mask & (tl.load(grads + tensor, mask=mask, other=0) != 0)
        counter = tl.load(rows + tensor * table.ROW + table.STEP, mask=mask, other=0)
        mask = mask & (counter != 0)
        counter = counter.to(tl.pointer_type(tl.float32))
        tl.store(counter, tl.load(counter, mask=mask, other=0.0) + 1, mask=mask)


@triton.jit
def finish(words, counters, outcome, loss_scale, BLOCK: tl.constexpr):
    """Phase 5: the last program out writes loss scale, step and skip counters."""
    if is_last_out(counters):
        consecutive = tl.load(outcome + CONSECUTIVE_SKIPS)
        found_inf = tl.load(outcome + FOUND_INF) != 0
        if tl.load(outcome + SKIPPED) != 0:
            tl.store(outcome + SKIPPED_STEPS, tl.load(outcome + SKIPPED_STEPS) + 1)
            tl.store(outcome + CONSECUTIVE_SKIPS, consecutive + 1)
        else:
            tl.store(outcome + CONSECUTIVE_SKIPS, 0.0)
            count_steps(words, BLOCK // 4)
        tl.store(outcome + PENDING_INF, 0.0)
        mode = tl.load(words + table.ADVANCE)
        if mode == 1:
            scale.advance(loss_scale, found_inf)
        if (mode == 2) & found_inf:
            tl.store(loss_scale + scale.FOUND_INF, 1.0)


@triton.jit
def step_kernel(
    words, partials, counters, outcome, loss_scale,
    SCALARS: tl.constexpr, UPDATE: tl.constexpr, VARIANTS: tl.constexpr, GRADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The whole step. Launch cooperatively.

    Args:
        words: int64, the device table (see :mod:`.table`).
        partials: ``[n_chunks]`` float64, written before it is read.
        counters: ``[2]`` int32, zero before and after.
        outcome: ``[OUTCOME]`` float64, laid out above.
        loss_scale: ``[scale.WORDS]`` float64; not touched unless the header asks for it.
        SCALARS, UPDATE: a rule (see :mod:`.rules`).
        VARIANTS: tuple of (grad dtype, param dtype, compute and state dtype, number of states, how the param is kept).
        GRADS: tuple of the distinct (grad dtype, compute dtype).
        BLOCK: elements per program and turn: 4 per thread, so that float32 moves in 16-byte accesses.
    """
    inv_scale = total_inv_scale(words, loss_scale)
    gather_statistics(words, partials, inv_scale, GRADS, BLOCK)
    grid_barrier(counters)
    norm, skip = decide(words, partials, outcome, inv_scale, BLOCK)
    if skip == 0:
        update(words, norm, inv_scale, SCALARS, UPDATE, VARIANTS, BLOCK)
    finish(words, counters, outcome, loss_scale, BLOCK)


@triton.jit
def statistics_kernel(words, partials, loss_scale, GRADS: tl.constexpr, BLOCK: tl.constexpr):
    """The first half: phase 1 of :func:`step_kernel`, with the same arguments."""
    gather_statistics(words, partials, total_inv_scale(words, loss_scale), GRADS, BLOCK)


@triton.jit
def sums_kernel(words, partials, outcome, loss_scale, sums, BLOCK: tl.constexpr):
    """Between the halves, where ranks or devices have to agree: what each gives. For one program.

    Writes to ``sums``, ``[slots, 2]`` float64: for each slot the sum of the partials that count, unscaled (ranks under
    a scaler of their own may have different scales), and 0, or NaN where there is an inf or NaN besides.
    """
    inv_scale = total_inv_scale(words, loss_scale)
    n_chunks = tl.load(words + table.N_CHUNKS).to(tl.int32)
    chunks = words + tl.load(words + table.CHUNKS)
    rows = words + tl.load(words + table.ROWS)
    lanes = tl.arange(0, BLOCK)
    for slot in range(tl.load(words + table.N_SLOTS).to(tl.int32)):
        total = tl.zeros([BLOCK], tl.float64)
        flag = tl.zeros([BLOCK], tl.float64)
        for start in range(0, n_chunks, BLOCK):
            mask = start + lanes < n_chunks
            tensor = tl.load(chunks + start + lanes, mask=mask, other=0) >> 32
            share = tl.load(rows + tensor * table.ROW + table.SHARE, mask=mask, other=-1)
            partial = tl.load(partials + start + lanes, mask=mask, other=0.0)
            total += tl.where(share == slot * 2 + 1, partial, 0.0)
            flag += tl.where(share == slot * 2, partial - partial, 0.0)
        tl.store(sums + slot * 2, tl.sum(total) * inv_scale * inv_scale)
        tl.store(sums + slot * 2 + 1, tl.sum(flag))
    if was_found(words, outcome):
        tl.store(sums + 1, float("nan"))


@triton.jit
def apply_kernel(
    words, partials, counters, outcome, loss_scale,
    SCALARS: tl.constexpr, UPDATE: tl.constexpr, VARIANTS: tl.constexpr, BLOCK: tl.constexpr, DECIDE: tl.constexpr,
):  # fmt: skip
    """The second half: phases 3 to 5 of :func:`step_kernel`, with the same arguments.

    ``partials`` may be what was agreed on instead: ``[header[N_SUMS]]`` float64.

    Without ``DECIDE`` nothing was gathered: no norm (NaN), no clipping, no skipping.
    """
    inv_scale = total_inv_scale(words, loss_scale)
    if DECIDE:
        norm, skip = decide(words, partials, outcome, inv_scale, BLOCK)
    else:
        norm = tl.full((), float("nan"), tl.float64)
        skip = tl.full((), 0, tl.int1)
        report(outcome, norm, skip, skip)
    if skip == 0:
        update(words, norm, inv_scale, SCALARS, UPDATE, VARIANTS, BLOCK)
    finish(words, counters, outcome, loss_scale, BLOCK)
