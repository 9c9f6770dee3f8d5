"""Exported programs on the CPU: `torch.export`, AOTInductor, a fresh process, a C++ program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import cpp_extension
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.exported_programs import (
    ROOT,
    SIZES,
    Lookups,
    check_lookups,
    export_lookups,
    lookup_inputs,
    serve_in_fresh_process,
)
from tests.inference.exported_collections import (
    MANY_KEYS,
    check_collection,
    export_collection,
    tensors,
)
from tests.inference.served_models import (
    KEYS,
    batch,
    collection,
    fb_table,
    mixed_tables,
    tt_table,
)
from torchrec_flowtt.inference import TensorInputs, export_with_dynamic_batch
from torchrec_flowtt.ops import library_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_lookups(dtype: torch.dtype, strict: bool) -> None:
    module = Lookups("cpu", dtype)
    check_lookups(export_lookups(module, "cpu", strict).module(), module, "cpu")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_collection(weighted: bool, strict: bool) -> None:
    ebc = collection(mixed_tables(weighted), weighted).eval()
    check_collection(export_collection(ebc, strict).module(), ebc)


class WithDense(nn.Module):
    """A model of sparse and dense features that returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = collection([tt_table("t", ["a"]), *mixed_tables()[1:2]])
        self.dense = nn.Linear(3, 8)

    def forward(self, features: KeyedJaggedTensor, dense: Tensor) -> dict[str, Tensor]:
        pooled = self.sparse(features)
        return {"sum": pooled["a"] + self.dense(dense), "other": pooled["b"]}


def test_a_model_with_dense_features() -> None:
    model = WithDense().eval()
    wrapped = TensorInputs(model, KEYS)
    program = export_with_dynamic_batch(wrapped, (*tensors(5, 4), torch.rand(5, 3)))
    for size, longest in SIZES:
        dense = torch.rand(size, 3)
        output = program.module()(*tensors(size, longest), dense)
        expected = model(batch(size, longest), dense)
        assert list(output) == list(expected)
        for name, tensor in output.items():
            torch.testing.assert_close(tensor, expected[name])


def test_examples_that_do_not_fit_are_refused() -> None:
    model = TensorInputs(collection(mixed_tables()), KEYS)
    values, lengths = tensors(5, 4)
    with pytest.raises(ValueError, match=r"at least 2 samples .* got 1 and"):
        export_with_dynamic_batch(model, tensors(1, 4))
    with pytest.raises(ValueError, match="got 5 and 1"):
        export_with_dynamic_batch(model, (values[:1], lengths))
    with pytest.raises(ValueError, match=r"for each of the 8 keys, got shape \(7, 5\)"):
        export_with_dynamic_batch(model, (values, lengths[1:]))
    with pytest.raises(ValueError, match=r"inputs\[2\] must have 5 .* got shape \(4, 3\)"):
        export_with_dynamic_batch(model, (values, lengths, torch.rand(4, 3)))
    weighted = TensorInputs(model.model, KEYS, is_weighted=True)
    with pytest.raises(ValueError, match="a weight for each lookup, got shape"):
        export_with_dynamic_batch(weighted, (values, lengths, torch.rand(5)))
    with pytest.raises(ValueError, match="inputs must be values, lengths and weights, got 2"):
        export_with_dynamic_batch(weighted, (values, lengths))
    number = values.numel()
    with pytest.raises(ValueError, match=f"lengths add up to, {number}, got {number - 1}"):
        export_with_dynamic_batch(model, (values[1:], lengths))
    with pytest.raises(TypeError, match="model must be a TensorInputs, got FlowTT"):
        export_with_dynamic_batch(model.model, (values, lengths))


def test_wrong_calls_of_the_model_are_refused() -> None:
    ebc = collection(mixed_tables())
    with pytest.raises(TypeError, match="keys must have one string a feature, .* 'abcd'"):
        TensorInputs(ebc, "abcd")
    model = TensorInputs(ebc, KEYS)
    values, lengths = tensors(5, 4)
    for wrong in (lengths.T, lengths.reshape(-1)):
        with pytest.raises(ValueError, match=r"lengths must be \[F, B\] with F = 8 keys"):
            model(values, wrong)
    with pytest.raises(ValueError, match="weights expected behind lengths"):
        TensorInputs(ebc, KEYS, is_weighted=True)(values, lengths)


def test_what_torch_cannot_export_is_not_hidden() -> None:
    """By the search for mistakes in the batch, which would look at values."""
    tables = [fb_table("plain", ["a"], pooling=PoolingType.MEAN), tt_table("t", ["b"])]
    model = TensorInputs(collection(tables, True).eval(), ["a", "b"], is_weighted=True)
    inputs = torch.tensor([1, 2, 3, 4]), torch.tensor([[1, 1], [2, 0]]), torch.rand(4)
    with pytest.raises(Exception, match="per_sample_weights"):
        export_with_dynamic_batch(model, inputs)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collection, compiled ahead of time."""
    path = tmp_path_factory.mktemp("package") / "collection.pt2"
    program = export_collection(collection(mixed_tables()).eval(), strict=False, keys=MANY_KEYS)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


@pytest.mark.slow
def test_compiled_collection(package: Path) -> None:
    ebc = collection(mixed_tables()).eval()
    check_collection(torch._inductor.aoti_load_package(str(package)), ebc, MANY_KEYS)


@pytest.mark.slow
def test_a_fresh_process_needs_the_operators_only(package: Path, tmp_path: Path) -> None:
    ebc = collection(mixed_tables()).eval()
    requests = [tensors(*size, keys=MANY_KEYS) for size in SIZES]
    answers = serve_in_fresh_process(package, requests, tmp_path)
    for size, answer in zip(SIZES, answers, strict=True):
        with torch.no_grad():
            expected = ebc(batch(*size, MANY_KEYS)).values()
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)

    # Without them, and with the library alone, which has no schemas, torch says what it lacks.
    for start in ("import torch", f"import torch; torch.ops.load_library({str(library_path())!r})"):
        program = f"{start}; torch._inductor.aoti_load_package({str(package)!r})"
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert result.returncode != 0
        assert "Could not find schema for flowtt::tt_embedding_bag" in result.stderr


@pytest.mark.slow
def test_a_program_in_cpp_serves_the_package(package: Path, tmp_path: Path) -> None:
    program = tmp_path / "serve_package"
    include = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    lib = cpp_extension.library_paths()[0]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    subprocess.run(
        [
            *("g++", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *include),
            str(ROOT / "examples" / "serve_package.cpp"),
            *(f"-L{lib}", f"-Wl,-rpath,{lib}", "-Wl,--no-as-needed"),
            *("-ltorch", "-ltorch_cpu", "-lc10", "-ldl", "-o", str(program)),
        ],
        check=True,
    )
    # Each key has two bags, one id in the first.
    count = len(MANY_KEYS)
    ids = [str(7 * key % 60) for key in range(count)]
    result = subprocess.run(
        [str(program), str(library_path()), str(package), str(count), *ids],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    features = KeyedJaggedTensor(
        MANY_KEYS, torch.tensor([int(i) for i in ids]), lengths=torch.tensor([1, 0] * count)
    )
    with torch.no_grad():
        expected = collection(mixed_tables())(features).values()
    answer = torch.tensor([float(x) for x in result.stdout.split()]).reshape(2, -1)
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled_lookups_in_bfloat16(tmp_path: Path) -> None:
    """What ``tests/gpu/test_export_on_cuda.py`` does on CUDA."""
    module = Lookups("cpu", torch.bfloat16)
    package = torch._inductor.aoti_compile_and_package(
        export_lookups(module, "cpu", strict=True), package_path=str(tmp_path / "lookups.pt2")
    )
    check_lookups(torch._inductor.aoti_load_package(package), module, "cpu")
    requests = [lookup_inputs(*size, "cpu") for size in SIZES]
    answers = serve_in_fresh_process(Path(package), requests, tmp_path)
    for request, answer in zip(requests, answers, strict=True):
        torch.testing.assert_close(answer, module(*request).detach(), rtol=1e-5, atol=1e-5)
