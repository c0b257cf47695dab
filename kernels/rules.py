"""The update rules: pure functions on values.

A rule is a pair of jitted functions, passed to the kernels as constexprs:

``scalars(hyper, lr, step, C)``
    Reads the group's own numbers (float64, at ``hyper``) and forms what all elements share, once per chunk.
    ``step`` is the parameter's count of applied steps, this one included (float64; 1 where it has no counter).
    Returns a tuple of scalars of the compute dtype ``C``.
``update(param, grad, state, scalars, C)``
    The update of one block of elements, in ``C``. ``grad`` is unscaled, clipped and negated already where asked;
    ``state`` is a tuple of as many tensors as the variant has. Returns the new param and the new state.

Corrections such as ``1 - beta ** step`` are formed in float64: in float32 they lose up to four digits.
"""

import triton
import triton.language as tl

# What each rule finds at ``hyper``.
WEIGHT_DECAY = tl.constexpr(0)
# SGD
MOMENTUM = tl.constexpr(1)
DAMPENING = tl.constexpr(2)
NESTEROV = tl.constexpr(3)
# Adam
DECOUPLED = tl.constexpr(1)
BETA1 = tl.constexpr(2)
BETA2 = tl.constexpr(3)
LOG_BETA1 = tl.constexpr(4)
LOG_BETA2 = tl.constexpr(5)
EPS = tl.constexpr(6)


@triton.jit
def divide(a, b, C: tl.constexpr):
    """Correctly rounded division (``/`` is approximate in float32)."""
    if C == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def root(x, C: tl.constexpr):
    """Correctly rounded square root (``tl.sqrt`` is approximate in float32)."""
    if C == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def sgd_scalars(hyper, lr, step, C: tl.constexpr):
    """``(lr, weight_decay, momentum, 1 - dampening, nesterov)``; a first step is not dampened."""
    dampening = tl.where(step == 1, 0.0, tl.load(hyper + DAMPENING))
    return (
        lr.to(C),
        tl.load(hyper + WEIGHT_DECAY).to(C),
        tl.load(hyper + MOMENTUM).to(C),
        (1 - dampening).to(C),
        tl.load(hyper + NESTEROV) != 0,
    )


@triton.jit
def sgd_update(p, g, state, scalars, C: tl.constexpr):
    """SGD as in ``torch.optim.SGD``; ``state`` is ``(momentum_buffer,)``, zero before the first step, or empty."""
    lr, weight_decay, momentum, undampened, nesterov = scalars
    g = tl.where(weight_decay != 0, g + weight_decay * p, g)
    if len(state) == 0:
        return p - lr * g, state
    else:
        buf = momentum * state[0] + undampened * g
        return p - lr * tl.where(nesterov, g + momentum * buf, buf), (buf,)


@triton.jit
def adam_scalars(hyper, lr, step, C: tl.constexpr):
    """What Adam's elements share; either of the two decays is inactive."""
    weight_decay = tl.load(hyper + WEIGHT_DECAY)
    decoupled = tl.load(hyper + DECOUPLED) != 0
    beta1 = tl.load(hyper + BETA1)
    beta2 = tl.load(hyper + BETA2)
    correction1 = 1 - tl.exp(step * tl.load(hyper + LOG_BETA1))
    correction2 = 1 - tl.exp(step * tl.load(hyper + LOG_BETA2))
    return (
        tl.where(decoupled, 0.0, weight_decay).to(C),
        tl.where(decoupled, 1 - lr * weight_decay, 1.0).to(C),
        (1 - beta1).to(C),
        beta2.to(C),
        (1 - beta2).to(C),
        (lr / correction1).to(C),
        tl.sqrt(correction2).to(C),
        tl.load(hyper + EPS).to(C),
    )


@triton.jit
def adam_update(p, g, state, scalars, C: tl.constexpr):
    """Adam and AdamW as in ``torch.optim``; ``state`` is ``(exp_avg, exp_avg_sq[, max_exp_avg_sq])``."""
    coupled_decay, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, correction2_sqrt, eps = scalars
    g = tl.where(coupled_decay != 0, g + coupled_decay * p, g)
    p = p * decay
    m = state[0] + one_minus_beta1 * (g - state[0])
    v = beta2 * state[1] + (one_minus_beta2 * g) * g
    if len(state) == 3:
        # The maximum is of the uncorrected second moment; NaN in either goes through, as in torch.
        largest = tl.maximum(state[2], v, propagate_nan=tl.PropagateNan.ALL)
        state = (m, v, largest)
    else:
        largest = v
        state = (m, v)
    denom = divide(root(largest, C), correction2_sqrt, C) + eps
    return p - divide(step_size * m, denom, C), state


SGD = (sgd_scalars, sgd_update)
ADAM = (adam_scalars, adam_update)
