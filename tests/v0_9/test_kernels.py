"""Each kernel against its twin in PyTorch: odd sizes, poisoned outputs, one thread and several."""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from common.llama import apply_rope, rms_norm
from v0_9_fast.kernels import bindings
from v0_9_fast.kernels.bindings import Kernels

SOURCES = Path(bindings.__file__).parent
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that a kernel is to fill is NaN at first, so that what it leaves out shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))


def close(ours, theirs, atol=1e-4):
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "depth"), [(96, 64), (33, 37), (15, 300), (1, 1), (64, 256), (70, 513)])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 12, 13, 17, 25, 96, 97, 200])
def test_a_product_is_that_of_the_stored_weights_in_any_shape(kernels, poisoned, num_rows, width, depth, dtype):
    x, weight, bias = torch.randn(num_rows, depth), torch.randn(width, depth), torch.randn(width)
    expected = x.double() @ weight.to(dtype).double().T
    packed = kernels.pack(weight, dtype)
    close(kernels.product(x, packed, width), expected)
    close(kernels.product(x, packed, width, bias), expected + bias)
    residual = torch.randn(num_rows, width)
    before = residual.double()
    assert kernels.product(x, packed, width, bias, add_to=residual) is residual
    close(residual, before + expected + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_depends_on_no_other_row(kernels, dtype):
    """Bit by bit within a way of widening: else a request's tokens could depend on who shares its step."""
    x, packed = torch.randn(40, 130), kernels.pack(torch.randn(70, 130), dtype)
    whole = kernels.product(x, packed, 70)
    for start, end in [(0, 1), (3, 7), (5, 17), (8, 39)]:
        assert torch.equal(kernels.product(x[start:end], packed, 70), whole[start:end])


def test_a_product_is_the_same_with_one_thread_and_with_three(kernels):
    x, packed = torch.randn(9, 130), kernels.pack(torch.randn(300, 130), torch.float32)
    alone = kernels.product(x, packed, 300)
    kernels.use_threads(3)
    try:
        assert torch.equal(kernels.product(x, packed, 300), alone)
    finally:
        kernels.use_threads(1)


def test_sixteen_bit_weights_are_widened_exactly_the_extreme_ones_too(kernels):
    """Subnormal numbers, the largest ones, negative zero: multiplied with 1, each has to come out as it is."""
    for dtype in DTYPES[1:]:
        info = torch.finfo(dtype)
        values = [0.0, -0.0, 1.0, -1.5, info.max, info.min, info.tiny, info.smallest_normal / 2, 0.1, 3e-5]
        weight = torch.tensor(values).to(dtype).float()[:, None]
        for num_rows in (1, 30):  # widened in registers, and in a block for all tiles
            product = kernels.product(torch.ones(num_rows, 1), kernels.pack(weight, dtype), len(values))
            assert torch.equal(product, weight.T.expand(num_rows, -1))


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (1, 576), (3, 37), (17, 100), (70, 512)])
def test_rms_norm_is_its_twin(kernels, poisoned, num_rows, width):
    weight = torch.rand(width) + 0.5
    for scale in (1e-3, 1.0, 2e4):
        x = torch.randn(num_rows, width) * scale
        close(kernels.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("num_rows", "num_heads", "head_dim"), [(1, 3, 64), (5, 12, 16), (17, 4, 128), (90, 9, 64)])
def test_rotation_is_its_twin_in_place_and_leaves_the_values_beside_it_alone(kernels, num_rows, num_heads, head_dim):
    qkv = torch.randn(num_rows, num_heads + 2, head_dim)
    angles = torch.rand(num_rows, head_dim // 2) * 100
    expected = qkv.clone()
    expected[:, :num_heads] = apply_rope(qkv[:, :num_heads], angles.cos()[:, None], angles.sin()[:, None])
    kernels.rotate(qkv[:, :num_heads], angles.cos(), angles.sin())
    close(qkv, expected, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 37), (17, 128), (40, 1536)])
def test_the_gate_is_its_twin_and_does_not_overflow(kernels, poisoned, num_rows, width):
    gate_up = torch.randn(num_rows, 2 * width) * 20
    gate_up[0, 0], gate_up[-1, width - 1] = 1e4, -1e4
    gate, up = gate_up.chunk(2, dim=1)
    close(kernels.silu_mul(gate_up), F.silu(gate) * up)


def test_the_exponential_of_the_gate_is_right_to_a_few_units_in_the_last_place(kernels):
    """silu(g) / g is 1 / (1 + exp(-g)): seen through it, over all of exp's range."""
    g = torch.linspace(-87, 87, 16 * 4096)
    sigmoid = kernels.silu_mul(torch.cat([g[None], torch.ones(1, len(g))], dim=1))[0] / g
    expected = torch.sigmoid(g.double())
    relative = ((sigmoid - expected) / expected).abs()
    assert relative.max() < 1e-6


def test_what_a_kernel_cannot_take_is_refused_before_c_sees_it(kernels):
    x, packed = torch.randn(4, 8), kernels.pack(torch.randn(5, 8), torch.float32)
    with pytest.raises(TypeError, match="not what the kernel takes"):
        kernels.product(torch.randn(4, 9), packed, 5)
    with pytest.raises(TypeError):
        kernels.product(x.double(), packed, 5)
    with pytest.raises(TypeError):
        kernels.product(torch.randn(8, 4).T, packed, 5)
    with pytest.raises(TypeError):
        kernels.product(x, packed, 5, add_to=torch.empty(4, 6))
    with pytest.raises(TypeError):
        kernels.rms_norm(x, torch.ones(7), 1e-5)


def test_the_kernels_share_the_openmp_runtime_of_pytorch(kernels):
    """Two of them in one process would each keep threads of their own busy."""
    maps = Path("/proc/self/maps").read_text()
    runtimes = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libiomp5" in line}
    assert len(runtimes) == 1
    assert hasattr(ctypes.CDLL(next(iter(runtimes))), "omp_get_max_threads")


def test_no_kernel_reads_or_writes_where_it_must_not(tmp_path):
    """A program in C that calls each kernel with memory of exactly the size that it may touch, under sanitizers."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "driver"
    flags = ["-O1", "-g", "-march=native", "-std=gnu11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    files = [Path(__file__).with_name("driver.c"), *SOURCES.glob("*.c")]
    command = [compiler, *flags, f"-I{SOURCES}", *map(str, files), "-o", str(program), "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "all kernels called\n"), ran.stderr


def test_kernels_of_one_library_are_loaded_once(kernels):
    assert bindings.load() is kernels
    assert isinstance(kernels, Kernels)
    assert math.log2(kernels.panel_width).is_integer()
