from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import torchrec_flowtt
from torchrec_flowtt import versions


def fake_metadata(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("version", "expected"), [("2.11.0+cu130", (2, 11)), ("1.6.1", (1, 6)), ("2.14", (2, 14))]
)
def test_release_reads_major_and_minor(version: str, expected: tuple[int, int]) -> None:
    assert versions.release(version) == expected


def test_release_refuses_what_is_no_version() -> None:
    with pytest.raises(ValueError, match="'nightly'"):
        versions.release("nightly")


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "no torch is installed"),
        ({"torch": "nightly"}, "torch: version 'nightly'"),
        ({"torch": "2.10.0"}, "found torch 2.10.0"),
    ],
)
def test_torch_is_required(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], message: str
) -> None:
    fake_metadata(monkeypatch, installed)
    with pytest.raises(ImportError, match=message):
        versions.require_torch()


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "TorchRec not installed, FBGEMM not installed"),
        ({"torchrec": "1.8.0"}, "FBGEMM not installed"),
        ({"torchrec": "1.3.0", "fbgemm-gpu": "1.3.0"}, "must be >= 1.6; .*TorchRec 1.3.0"),
        ({"torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.7.0"}, "same release; .*1.7.0 .fbgemm-gpu-cpu"),
    ],
)
def test_torchrec_and_fbgemm_are_required(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], message: str
) -> None:
    fake_metadata(monkeypatch, {"torch": "2.13.0+cpu", **installed})
    monkeypatch.delenv(versions.UNLIKE_RELEASES_VARIABLE, raising=False)
    with pytest.raises(ImportError, match=message) as caught:
        versions.require_torchrec()
    assert "TorchRec 1.8 + FBGEMM 1.8 + torch 2.13" in str(caught.value)


def test_unlike_releases_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_metadata(
        monkeypatch, {"torch": "2.13.0+cpu", "torchrec": "1.6.1", "fbgemm-gpu-cpu": "1.8.0"}
    )
    monkeypatch.setenv(versions.UNLIKE_RELEASES_VARIABLE, "1")
    versions.require_torchrec()
    monkeypatch.setenv(versions.UNLIKE_RELEASES_VARIABLE, "0")
    with pytest.raises(ImportError, match="same release"):
        versions.require_torchrec()


def test_a_library_that_does_not_load_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise OSError(f"{name}: undefined symbol: _ZN3c105ErrorC2E\nmore")

    monkeypatch.setattr(versions.importlib, "import_module", import_module)
    with pytest.raises(ImportError, match=r"does not load .*undefined symbol: _ZN3c105ErrorC2E\)"):
        versions.require_torchrec()


def test_a_newer_torchrec_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_metadata(
        monkeypatch, {"torch": "2.19.0", "torchrec": "1.14.0", "fbgemm-gpu-cpu": "1.14.0"}
    )
    with pytest.warns(UserWarning, match="not tested with TorchRec 1.14.0"):
        versions.require_torchrec()


def test_light_layers_import_without_torchrec_and_fbgemm() -> None:
    script = (
        "import sys\n"
        "sys.modules.update(torchrec=None, fbgemm_gpu=None)\n"
        "import torchrec_flowtt.config, torchrec_flowtt.modules\n"
        "torchrec_flowtt.TTSpec.suggest(1000, 16, tt_ranks=4)\n"
        "for name in ('FlowTTEmbeddingBagConfig', 'FlowTTEmbeddingShardingPlanner'):\n"
        "    try:\n"
        "        getattr(torchrec_flowtt, name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2
    assert all("TorchRec" in line for line in result.stdout.splitlines())


def test_configuration_imports_without_torch() -> None:
    script = "import sys, torchrec_flowtt.config; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_public_names_are_listed() -> None:
    assert torchrec_flowtt.__version__.count(".") == 2
    assert "TTSpec" in dir(torchrec_flowtt)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = torchrec_flowtt.nothing
