"""One call after ``backward()``: unscale, check, clip, update, adjust the loss scale. In one launch on a GPU.

opt = tritonamp.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)
opt.backward(loss)
opt.step()
"""

from .adam import Adam, AdamW
from .fuse import fuse
from .grad_scaler import GradScaler
from .loss_scale import LossScale
from .sgd import SGD

__version__ = "0.1.0"
__all__ = ["SGD", "Adam", "AdamW", "GradScaler", "LossScale", "fuse"]
