"""Fixtures that several test files share."""

from __future__ import annotations

import builtins
import contextlib
import gc
import os
import shutil
import signal
import ssl

os.environ["TRITON_INTERPRET"] = "1"  # what kernels are defined by: read when Triton is imported, by whichever test
os.environ["OLLAMA_MODELS"] = os.environ["LLAMA_CACHE"] = "/absent"  # no test lists this machine's own models
os.environ["OMP_NUM_THREADS"] = "1"  # a command that a test forks would wait for threads that were not forked with it
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, settings

from localllm.text.tokenizer import Tokenizer
from tests.cli_support import Result, run_cli, share_kernels, write_checkpoint
from tests.fake_hub import FakeHub, serve
from tests.terminal import Open, Terminal

REPOSITORY = Path(__file__).parent.parent

# A busy machine draws examples slowly and takes long over one, which says nothing of what is tested.
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("any machine", deadline=None, suppress_health_check=CHECKS, max_examples=100)
settings.register_profile("quick", settings.get_profile("any machine"), max_examples=33)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on a third of their examples where the slow tests do not run: see `thinning.examples`."""
    if config.option.markexpr == "not slow":
        settings.load_profile("quick")


def pytest_collection_finish() -> None:
    """What the libraries and the tests themselves have made stays: not to look through it again and again saves a tenth
    of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Real tokenizers, templates, configs and texts that are too large or not ours to ship."""
    root = Path(os.environ.get("LOCALLLM_TEST_DATA", REPOSITORY.parent / "shared" / "data"))

    def locate(relative: str) -> Path:
        path = root / relative
        if not path.exists():
            pytest.skip(f"{path} is absent; set LOCALLLM_TEST_DATA to a folder that has {relative}")
        return path

    return locate


@pytest.fixture(scope="session")
def qwen(shared_data: Callable[[str], Path]) -> Tokenizer:
    """A byte-level tokenizer of 151,936 tokens."""
    return Tokenizer.load(shared_data("tokenizers/qwen2.5-0.5b-instruct"))


@pytest.fixture(scope="session")
def phi(shared_data: Callable[[str], Path]) -> Tokenizer:
    """A sentencepiece tokenizer of 32,000 tokens."""
    return Tokenizer.load(shared_data("tokenizers/phi-3-mini"))


@pytest.fixture(scope="session", autouse=True)
def heard_hangup() -> None:
    """`nohup` has programs ignore SIGHUP, and those that they start."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--measured", action="store_true", help="what a plan measures of the machine is known already")


@pytest.fixture(scope="session", autouse=True)
def own_folders_of_the_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the tests pack and say stays out of the developer's folders, and what is there out of the tests.

    The workers share the compiled kernels: 15 s of processor time.
    """
    cache = tmp_path_factory.mktemp("cache")
    base = tmp_path_factory.getbasetemp()
    kernels = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    kernels.mkdir(exist_ok=True)
    (cache / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("LOCALLLM_CACHE", str(cache))
        if request.config.getoption("measured"):
            request.getfixturevalue("known_machine")(cache)
        yield


@pytest.fixture(scope="session", autouse=True)
def known_rates() -> Iterator[None]:
    """Of a small machine that has nothing else to do, whatever this one is and does: plans are the same anywhere."""
    from localllm.offload.measurements import measurement, roofline
    from localllm.offload.planner import other_work
    from localllm.offload.planner.profile import FormatRates

    def rates(weight_format: Any, dtype: Any, device: Any) -> FormatRates:
        return FormatRates(12.0, 200.0) if device.type == "cpu" else measured(weight_format, dtype, device)

    measured = measurement.format_rates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "format_rates", rates)
        patch.setattr(measurement, "_dram_gbs", lambda: 20.0)
        patch.setattr(measurement, "_disk_gbs", lambda _folder: 1.5)
        patch.setattr(other_work, "counted", lambda: other_work.Counted(0.0, 0.0, 0.0))
        # What a benchmark sets beside its figures: 2 s a command, with these 20 ms.
        patch.setattr(roofline, "MATMUL_SHAPE", (64, 1024, 1024))
        patch.setattr(roofline, "MEMORY_BYTES", 32 << 20)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Every client reads 150 certificates, 30 ms each time, and no test speaks TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def small_heaps_kept() -> Iterator[None]:
    """What is freed by small models is little: to look for it in the heap of a whole run takes 20 ms a load. Where it
    is measured, a process of its own loads the model."""
    from localllm.engine import placement, weights
    from localllm.models import convert

    with pytest.MonkeyPatch.context() as patch:
        for module in (placement, weights, convert):
            patch.setattr(module, "give_back_freed", lambda: None)
        yield


@pytest.fixture(scope="session")
def known_machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Puts this machine's rates and compiled kernels into a cache of a test's own: to find them out takes 6 s."""
    with pytest.MonkeyPatch.context() as patch:
        known = share_kernels(tmp_path_factory.mktemp("known") / "cache")
        patch.setenv("LOCALLLM_CACHE", str(known))
        for weights in ("bf16", "bf12", "int8", "int4-g64"):
            assert run_cli("plan", "tiny", "--weights", weights).code == 0

    def put(folder: Path) -> None:
        there = shutil.ignore_patterns("kernels") if (folder / "kernels").exists() else None
        shutil.copytree(known, folder, symlinks=True, ignore=there, dirs_exist_ok=True)

    return put


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def talk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A plain chat of these lines, with answers of four tokens, by a user who has had none before."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def talked(*lines: str, flags: tuple[str, ...] = (), named: bool = True) -> Result:
        line = ("chat", *([model] if named else []), "--plain", "--max-tokens", "4", "--seed", "1", *flags)
        return run_cli(*line, stdin="".join(f"{line}\n" for line in lines).encode())

    return talked


@pytest.fixture(scope="module")
def hub_servers() -> Iterator[FakeHub]:
    from huggingface_hub import close_session

    with serve() as fake:
        yield fake
    close_session()


@pytest.fixture
def fake(hub_servers: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub that nothing stands in front of, and a user without a token."""
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    return hub_servers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, as transformers writes it."""
    from tests.packed_support import small_checkpoint

    return small_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def made(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, packed."""
    from tests.packed_support import WEIGHTS, pack

    return pack(checkpoint, tmp_path_factory.mktemp("packed") / WEIGHTS)


@pytest.fixture(scope="module")
def whole(made: Path) -> dict[str, bytes]:
    """What every conversion of it must come to."""
    return {path.name: path.read_bytes() for path in made.iterdir()}


@pytest.fixture
def target(made: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return shutil.copytree(made, tmp_path / "packed")


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and downloads of this test alone."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(share_kernels(tmp_path / "cache")))
    return tmp_path / "cache"


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Has torch compute with so many; with as many as before when the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_descriptor_left() -> Iterator[None]:
    """Whatever the test opens is closed when it ends."""
    before = len([*Path("/proc/self/fd").iterdir()])
    yield
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.fixture
def without_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Exception], None]:
    """Makes the import of a library fail with an error."""
    plain_import = builtins.__import__

    def forbid(library: str, error: Exception) -> None:
        def importing(name: str, *arguments: Any, **keywords: Any) -> Any:
            if name.partition(".")[0] == library:
                raise error
            return plain_import(name, *arguments, **keywords)

        monkeypatch.setattr(builtins, "__import__", importing)

    return forbid


@pytest.fixture(scope="session")
def card_guard(request: pytest.FixtureRequest) -> None:
    """What torch lacks for tensors on the simulated card."""
    import torch

    from tests.simulated_card.guard import compiler, register_guard

    if torch.version.cuda is not None:
        pytest.skip("the card is simulated where torch is a build for the CPU")
    if compiler() is None:
        pytest.skip("the simulated card needs a C++ compiler: install g++")
    register_guard(request.config.cache.mkdir("simulated_card"))


@pytest.fixture
def simulated_card(card_guard: None) -> Callable[..., AbstractContextManager[Any]]:
    """Gives torch a card, cuda:0, inside `with simulated_card(CardConfig(...)) as card:`; see tests/simulated_card."""
    from tests.simulated_card.support import on_simulated_card

    return on_simulated_card


@pytest.fixture
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of matrices in the interpreter: numpy's rows have other bits by where they stand, a card's have not."""
    monkeypatch.setattr(numpy, "matmul", lambda a, b, dtype: numpy.stack([row @ b for row in a]).astype(dtype))


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Open]:
    """Starts a command on a terminal of its own, which is closed when the test ends."""
    with contextlib.ExitStack() as terminals:

        def opened(*arguments: str | Path, **options: Any) -> Terminal:
            terminal = Terminal(tmp_path, *arguments, **options)
            terminals.callback(terminal.close)
            return terminal

        yield opened
