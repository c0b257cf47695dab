"""The virtual GPU as Triton's active driver.

Triton compiles for the CUDA target as usual. ``load_binary`` is given the cubin; its PTX is found through
``kernel_load_start_hook``, which is passed the paths of all stages of the compilation. The launcher hands PTX and
arguments to a :class:`~.launch.Launch`.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as runtime

from .errors import LaunchError
from .floats import to_bf16
from .kernel import Kernel
from .launch import Launch
from .machine import Machine
from .stats import Stats
from .tensors import Tensors

FLOATS = {"fp16": np.float16, "fp32": np.float32, "f32": np.float32, "fp64": np.float64, "f64": np.float64}
NULL = "*i8", None


class Ordinal(int):
    """Device number 0, distinct per configuration as a key of caches per device."""

    key: tuple[object, ...]

    def __new__(cls, key: tuple[object, ...]) -> "Ordinal":
        """Device 0 of a configuration."""
        self = super().__new__(cls, 0)
        self.key = key
        return self

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Ordinal) else int(self) == other


class Function:
    """A loaded kernel: its PTX, and the resources that ptxas gave it."""

    def __init__(self, name: str, cubin: bytes, ptx: str, shared: int) -> None:
        self.name, self.shared, self.kernel = name, shared, Kernel(ptx)
        self.registers, self.spills = resources(name, cubin)


def resources(name: str, cubin: bytes) -> tuple[int, int]:
    """Registers and spilled registers of a kernel, as cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", f.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    m = re.search(rf"Function {re.escape(name)}:\s*(.*)", out)
    usage = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", m[1] if m else "")}
    if "REG" not in usage:
        raise RuntimeError(f"cuobjdump tells nothing about {name}: {out!r}")
    return usage["REG"], (usage.get("STACK", 0) + usage.get("LOCAL", 0)) // 4


class Utils:
    """What Triton asks of a driver's utilities."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def load_binary(self, name: str, cubin: bytes, shared: int, _device: int) -> tuple[None, Function, int, int, int]:
        """Module (none: there is nothing to unload), function, registers, spills, most threads per block."""
        function = VirtualDriver.functions.get(cubin)
        if function is None:
            if VirtualDriver.ptx_path is None:
                raise RuntimeError("the virtual GPU needs the PTX: do not set TRITON_STORE_BINARY_ONLY")
            function = Function(name, cubin, VirtualDriver.ptx_path.read_text(), shared)
            VirtualDriver.functions[cubin] = function
        return None, function, function.registers, function.spills, 1024

    def unload_module(self, module: object) -> None:
        """Nothing to do."""

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Of the virtual GPU; the rates are made up."""
        m = self.machine
        return {
            "max_shared_mem": m.max_shared,
            "max_num_regs": 65536,
            "multiprocessor_count": m.sms,
            "warpSize": 32,
            "sm_clock_rate": 1_500_000,
            "mem_clock_rate": 2_600_000,
            "mem_bus_width": 5120,
        }


class Launcher:
    """Launches one compiled kernel on whatever virtual GPU is active."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.signature, self.metadata = list(src.signature.values()), metadata
        for name in ("global_scratch_size", "profile_scratch_size"):
            if getattr(metadata, name, 0):
                raise NotImplementedError(f"{name} = {getattr(metadata, name)}")
        if getattr(metadata, "num_ctas", 1) != 1:
            raise NotImplementedError("clusters (num_ctas > 1)")

    def __call__(
        self, x: int, y: int, z: int, _stream: int, function: Function, _packed: object, launch_metadata: object,
        enter: Any, exit_: Any, *args: Any,
    ) -> None:  # fmt: skip
        """Run the kernel to the end."""
        gpu, meta, program = runtime.active.gpu, self.metadata, function.kernel.program
        values = list(flatten(self.signature, args))
        scratch = len(program.params) - len(values)  # trailing pointers
        if not 0 <= scratch <= 2:
            raise LaunchError(f"{function.name} has {len(program.params)} parameters, got {len(values)} arguments")
        values += [NULL] * scratch
        pairs = zip(program.params, values, strict=True)
        params = {name: pack(t, v).ljust(n, b"\0") for (name, _, n), (t, v) in pairs}
        gpu.tensors.start(v for _, v in values if isinstance(v, torch.Tensor))
        if enter is not None:
            enter(launch_metadata)
        if x * y * z:
            Launch(
                gpu,
                function.kernel,
                (x, y, z),
                program.threads or meta.num_warps * 32,
                params,
                dynamic_shared=function.shared,
                cooperative=meta.launch_cooperative_grid,
                registers=function.registers,
                spills=function.spills,
                name=function.name,
            ).run()
        if exit_ is not None:
            exit_(launch_metadata)


def flatten(signature: list[Any], args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """(type, value) of the arguments that are parameters of the kernel."""
    for t, v in zip(signature, args, strict=False):
        if isinstance(t, tuple):
            yield from flatten(list(t), v)
        elif t.startswith("tensordesc"):
            raise NotImplementedError("tensor descriptors as arguments")
        elif t != "constexpr":
            yield t, v


def pack(t: str, v: Any) -> bytes:
    """An argument as the bytes of a parameter."""
    if t[0] == "*":
        address = v.data_ptr() if hasattr(v, "data_ptr") else int(v or 0)
        return int(address).to_bytes(8, "little")
    if t[0] in "iu":
        bits = max(int(t[1:]), 8)
        return (int(v) % (1 << bits)).to_bytes(bits // 8, "little")
    if t == "bf16":
        return to_bf16(np.array([v], np.float32)).tobytes()
    packed: bytes = FLOATS[t](v).tobytes()
    return packed


class VirtualGPU(Machine):
    """A machine whose memory is that of CPU tensors."""

    def __init__(self, arch: int = 90, sms: int = 4, *, auto_register: bool = False, **settings: Any) -> None:
        super().__init__(arch, sms, **settings)
        self.tensors = Tensors(self.memory, auto=auto_register)


class VirtualDriver(DriverBase):  # type: ignore[misc]  # Triton is not typed
    """What Triton asks of a driver."""

    functions: dict[bytes, Function] = {}  # noqa: RUF012 (by cubin; shared by all drivers)
    ptx_path: Path | None = None  # of the kernel being loaded

    def __init__(self, gpu: VirtualGPU) -> None:
        self.gpu, self.utils, self.launcher_cls = gpu, Utils(gpu), Launcher
        self.device = Ordinal(("virtual", gpu.arch, gpu.max_shared, gpu.sms))

    @classmethod
    def is_active(cls) -> bool:
        """Not by itself."""
        return False

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self.gpu.arch, 32)

    def get_current_device(self) -> Ordinal:
        """The only device."""
        return self.device

    def set_current_device(self, device: int) -> None:
        """Nothing to do."""

    def get_current_stream(self, _device: int | None = None) -> int:
        """The only stream."""
        return 0

    def get_device_capability(self, _device: int | None = None) -> tuple[int, int]:
        """Compute capability."""
        return divmod(self.gpu.arch, 10)

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Torch's module for that device."""
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        """As the CUDA driver."""
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_benchmarker(self) -> Any:
        """There is none."""
        raise NotImplementedError("the virtual GPU has no clock")

    @classmethod
    def remember(cls, _module: object, _function: object, _name: str, metadata_group: dict[str, str], _h: str) -> None:
        """Hook: note where the PTX is of the kernel about to be loaded."""
        cls.ptx_path = next((Path(p) for f, p in metadata_group.items() if f.endswith(".ptx")), None)


_active: list[VirtualGPU] = []


@contextlib.contextmanager
def virtual_gpu(
    arch: int = 90,
    sms: int = 4,
    *,
    seed: int | None = None,
    quantum: int = 200,
    race: bool | Literal["threads"] = False,
    traffic: bool = True,
    l2_bytes: int = 32 << 20,
    auto_register: bool = False,
    idle_limit: int = 5_000_000,
) -> Iterator[Stats]:
    """Run Triton kernels that are launched in this context on CPU tensors, in the simulator.

    Args:
        arch: compute capability to compile for: 75, 80, 86, 87, 89, 90, 100, 103, 120.
        sms: multiprocessors.
        seed: None: blocks run together as far as they can. A number: they are interleaved at random.
        quantum: instructions per turn of a block (at most, with a seed).
        race: True: report races between blocks; "threads": also between threads of a block.
        traffic: count memory traffic.
        l2_bytes: capacity of the L2 model, 0 for none.
        auto_register: every live CPU tensor is accessible.
        idle_limit: instructions without a change of global memory after which a launch is given up.

    Yields:
        What the launches do, as they are made.

    Raises:
        ValueError: an argument is out of range.
        SimError: from the launch, what the kernel did wrong.
        NotImplementedError: from the launch, when it reaches an instruction that the simulator does not know.
    """
    settings = {"seed": seed, "quantum": quantum, "race": race, "traffic": traffic, "l2_bytes": l2_bytes}
    gpu = VirtualGPU(arch, sms, auto_register=auto_register, idle_limit=idle_limit, **settings)
    previous = runtime._active
    knobs.runtime.kernel_load_start_hook.add(VirtualDriver.remember)
    runtime.set_active(VirtualDriver(gpu))
    _active.append(gpu)
    try:
        yield gpu.stats
    finally:
        _active.remove(gpu)
        runtime.set_active(previous)
        if not _active:
            knobs.runtime.kernel_load_start_hook.remove(VirtualDriver.remember)


def register(*tensors: torch.Tensor) -> None:
    """Make tensors that kernels reach only through pointers in memory accessible, as long as the context lasts.

    Bounds are those of the storage.

    Raises:
        RuntimeError: there is no virtual GPU.
        ValueError: a tensor is not in host memory.
    """
    if not _active:
        raise RuntimeError("register() is for use inside `with virtual_gpu():`")
    for t in tensors:
        _active[-1].tensors.register(t)
