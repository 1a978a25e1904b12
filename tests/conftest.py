"""Shared fixtures: small checkpoints, models and bundles, each made once for the whole run."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray
from safetensors.numpy import save_file
from xdist.scheduler import LoadFileScheduling

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export import options as export_options
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.emit.fill import Errors
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.quantizer import QUANTIZERS, DirectLevels
from edgespec.export.source.source import resolve
from edgespec.planning import profiles as quiet
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import ModelPart, Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.support import arm64, hf, saved
from tests.support.alone import alone, common
from tests.support.breadth import leave_out
from tests.support.required import unexpected

if TYPE_CHECKING:
    import openai

    from tests.server.conftest import Served

settings.register_profile("edgespec", deadline=None, max_examples=50)  # no test asserts a time
settings.register_profile("thorough", deadline=None, max_examples=2000)
# a submission is judged on the same inputs each time; a manual run and the nightly one try new ones
settings.register_profile("submission", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("submission" if os.environ.get("EDGESPEC_CI") == "run" else "edgespec")
export_options.CALIBRATED = ()  # as by --quick; what calibrates asks for it (tests/export/test_calibrated.py)
quiet.BUSY = quiet.OTHERS = math.inf  # tests share their processors: what they time is a busy machine's

OPERATORS: tuple[Operators, ...] = ("stock", "native")
COMPILERS = ("c++", "g++", "clang++", "cl")
TARGET, DRAFT = "builtin:shakespeare", "builtin:shakespeare-draft"
HEAD_METHODS = "medusa", "blockwise", "paradecode"
# there is a process per core; plain texts are computed with two, which checks that texts do not depend on it
THREADS = 1

PROMPTS = (
    "KING RICHARD:\n",
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n",
    "O Romeo, Romeo! wherefore art thou",
    "My lord,",
    "QUEEN MARGARET:\nWhat, ",
    "The",
    "To be, or not to be",
    "JULIET:\nGood night, good night! ",
    "Now is the winter of our discontent\n",
    "Enter the DUKE and his men.\n\nDUKE:\n",
    "the the the the the",
    "Nay, sir, I know not what you mean by that: but if",
    "1. 2. 3. 4.",
    "Ah\u00e7\u00fa \u2014 na\u00efve caf\u00e9 \u2603",
    "GLOUCESTER:\nAnd so I was; which plainly signified\nThat I should snarl and bite and play the dog.\n",
    "Speak,",
    "\n\nA",
    "I'll",
    "MENENIUS:\nThere was a time when all the body's members\nRebell'd against the belly, thus accused it:\n" * 2,
    "Farewell",
)
"""Twenty prompts for models that speak Shakespeare, of 1 to about 80 tokens, some of them strange to it."""


LARGE: dict[str, Any] = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
         "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
         "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
         "max_position_embeddings": 1024}  # fmt: skip
"""A model of more than 100 million parameters, for tests of memory."""


@dataclass(frozen=True)
class Written:
    """A model part on disk with all its graphs, its source, and how to run it."""

    folder: Path
    arch: Architecture
    part: ModelPart
    errors: Errors

    @property
    def main(self) -> str:
        """The graph that runs every method."""
        return "native" if self.part.layout == "native" else "gated"

    def model(self, graph: str | None = None, threads: int = 1) -> Model:
        """``native``, ``gated``, ``strict`` (that without gates) or ``plain`` (without the padding of strict mode)."""
        if graph == "strict" and graph not in self.part.graphs:  # few tests ask for it
            (folder := self.folder / graph).mkdir()
            spec = ModelSpec(self.part.format, prefix="strict/", layout="stock")
            other = write_model(folder, self.arch, spec, DirectLevels(QUANTIZERS[self.part.quantizer or "rtn"]))
            graphs = {**self.part.graphs, graph: other.part.graphs[graph]}
            object.__setattr__(self, "part", self.part.model_copy(update={"graphs": graphs}))
        return Model(self.folder, self.part, graph or self.main, threads)

    def slot(self, graph: str | None = None, threads: int = 1) -> Slot:
        return open_slot(self.model(graph, threads), reserve=1)


@dataclass(frozen=True)
class Reference:
    """Results of transformers for a checkpoint: logits [r, vocab] at ``rows`` of ``tokens``, and a continuation."""

    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    logits: NDArray[np.float32]
    greedy: NDArray[np.int64]


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    """Make a client of OpenAI's for the module's own server."""
    with server.openai() as made:
        yield made


SKIPPED = 8  # exit code of a run that skipped tests that it must run; pytest does not use it

LONGEST = (
    "runtimes/native/test_kernels.py",
    "runtimes/devices/test_webgpu.py",
    "android/test_kotlin.py",
    "lossless/test_architectures.py",
    "cli/test_terminal.py",
    "cli/test_export.py",
    "decoding/test_distribution.py",
    "export/test_calibrated.py",
    "server/test_stopping.py",
    "judge/test_judging.py",
    "runtimes/native/test_sessions.py",
    "lossless/test_sampled.py",
    "server/test_models.py",
    "cli/test_run.py",
    "server/test_prompts.py",
)


WITH_TORCH = (
    "audio/",
    "decoding/test_beams.py",
    "engine/test_embedding.py",
    "export/training/",
    "export/architectures/test_saved.py",
    "export/drafters/test_heads.py",
    "export/source/test_embedded_pairs.py",
    "export/tokenizers/test_tokenizers_of_transformers.py",
    "test_benchmarks.py",
)
"""Files whose tests import torch or transformers, which takes a process five seconds; no file does when it is read."""


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A file is one process's; those with torch are all one's."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "torch" if file.removeprefix("tests/").startswith(WITH_TORCH) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Spread the files over the processes."""
    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--whole``."""
    parser.addoption("--whole", action="store_true", help="run every cell of the tests in tests/support/breadth.py")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of the run whether files or folders were named: it is always given some."""
    node.workerinput["every_cell"] = _every_cell(node.config)


def _every_cell(config: pytest.Config) -> bool:
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    return bool(getattr(config, "workerinput", {}).get("every_cell", named or config.getoption("--whole")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cells to nightly, and run the longest files first.

    A file is one process's, and the others must not wait for one that began last.
    """
    if not _every_cell(config):
        left = leave_out([item.nodeid for item in items if item.get_closest_marker("nightly") is None])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
    place = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what stays to the end: 330,000 objects, a quarter of a second."""
    gc.freeze()


def skipped(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Count the skipped tests of a run by their reasons."""
    reports = (report.longrepr for report in reporter.stats.get("skipped", []))
    return Counter(str(one[2] if isinstance(one, tuple) else one).removeprefix("Skipped: ") for one in reports)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report skipped tests, and those that must not be skipped (``tests/support/required.py``)."""
    reasons = skipped(terminalreporter)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    for reason in unexpected(reasons):
        terminalreporter.write_line(f"failed: {os.environ['EDGESPEC_CI']} must not skip what {reason}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail if this run skipped tests that it must run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and unexpected(skipped(reporter)):
        session.exitstatus = SKIPPED


@pytest.fixture(scope="session")
def shared() -> Path:
    """Find the data folder next to the repository, or skip the tests that need it."""
    beside = Path(__file__).resolve().parents[1].parent / "shared"
    folder = Path(os.environ.get("EDGESPEC_TEST_DATA", beside))
    if not (folder / "data" / "models").is_dir():
        pytest.skip(
            "needs trained models that are not part of the repository (EDGESPEC_TEST_DATA, see CONTRIBUTING.md)"
        )
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of ``hf.CONFIGS`` -> folder of the checkpoint that its reference logits were computed from."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = hf.write_reference_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Reference]:
    """Name of ``hf.CONFIGS`` -> what transformers computed."""

    def get(name: str) -> Reference:
        arrays = saved.reference_arrays(name)
        return Reference(**{key: arrays[key] for key in ("tokens", "rows", "logits", "greedy")})

    return get


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep converted weights and the key with the run's other files, and no prompts, for any settings of the user."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("EDGESPEC_CACHE", str(folder))
        patch.setenv("EDGESPEC_KEY", str(folder.with_name("key")))
        patch.setenv("EDGESPEC_PROMPT_CACHE", "0")
        yield folder


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """Nothing that a test writes outlives a loss of power, so this process waits for no disk; others of a test do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session")
def native() -> None:
    """Native operators are there: a must where there is a compiler to build them, else the test is skipped."""
    library = native_library()
    if library.path is None and any(map(shutil.which, COMPILERS)):
        pytest.fail(f"there is a C++ compiler, so native operators must be there: {library.reason}")
    if library.path is None:
        pytest.skip(f"no C++ compiler to build native operators with: {library.reason}")


@pytest.fixture
def operators(request: pytest.FixtureRequest) -> Operators:
    """Which operators ``written``, ``bundle`` and ``engine`` use: stock, unless a test or its module asks for others.

    A module overrides this fixture with ``params=OPERATORS``, a test parametrizes it indirectly.
    """
    return use_operators(request)


def use_operators(request: pytest.FixtureRequest) -> Operators:
    """Give the operators that a test is parametrized with."""
    kind: Operators = getattr(request, "param", "stock")
    if kind == "native":
        request.getfixturevalue("native")
    return kind


@pytest.fixture(scope="session")
def writer(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Written]:
    """(operators, name of ``hf.CONFIGS``, ``builtin:NAME`` or folder, format, quantizer) -> the model, all graphs."""
    made: dict[tuple[Operators, str, Format, str], Written] = {}

    def get(layout: Operators, name: str, form: Format = "fp32", quantizer: str = "rtn") -> Written:
        key, chosen = (layout, name, form, quantizer), DirectLevels(QUANTIZERS[quantizer])
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            arch = open_model(checkpoint(name) if name in hf.CONFIGS else resolve(name), hf.CONTEXTS.get(name))
            result = write_model(folder, arch, ModelSpec(form, gated=True, layout=layout), chosen)
            made[key] = Written(folder, arch, result.part, result.errors)
        return made[key]

    return get


@pytest.fixture
def written(writer: Callable[..., Written], operators: Operators) -> Callable[..., Written]:
    """``writer`` for the operators of this test; weights have their layout."""
    return partial(writer, operators)


def fixed_skip_set(folder: Path, model: str) -> Path:
    """Make a fixed skip set file for a model, instead of a search: two attentions and an MLP."""
    layers = open_model(resolve(model), None).facts.layers
    file = folder / "skip.json"
    file.write_text(json.dumps({"attention": [1, layers - 2], "mlp": [layers // 2]}), "utf-8")
    return file


def method_parts(target: str) -> tuple[list[str], list[str]]:
    """List the methods of a test bundle of this target, without ar and ngram, and the folders of heads they need."""
    methods = ["speculative", "self-spec", "swift"]
    if target.startswith("builtin:"):  # embedded models include heads
        return [*methods, *HEAD_METHODS], []
    trained = Path(target).parent / f"medusa-heads-{Path(target).name}"
    return ([*methods, "medusa"], [str(trained)]) if trained.is_dir() else (methods, [])


@pytest.fixture(scope="session")
def arm_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the native operators for arm64, with their object files; all processes of a run share it."""
    arm64.need_compiler()
    folder = common(tmp_path_factory) / "arm64"
    folder.mkdir(exist_ok=True)
    with alone(folder / "lock"):
        library = folder / arm64.LIBRARY
        return library if library.exists() else arm64.cross_compile(folder)


def export_bundle(folder: Path, operators: Operators, form: Format, target: str = TARGET, draft: str = DRAFT) -> Path:
    """Make a bundle with every method, in a separate folder."""
    methods, heads = method_parts(target)
    skip_set = fixed_skip_set(folder, target)
    options = ExportOptions(target, folder / "bundle", methods, form, heads=heads, draft=draft, skip_set=skip_set,
                            threads=THREADS, operators=operators)  # fmt: skip
    export_model(options, golden=False)
    return options.output


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """(operators, format, target, draft) -> a bundle with every method; its skip set does not depend on timing.

    All processes of a run share it: tests must not change it.
    """
    place = common(tmp_path_factory)

    def get(operators: Operators, form: Format = "int4", target: str = TARGET, draft: str = DRAFT) -> Path:
        if operators == "native":
            request.getfixturevalue("native")
        names = [operators, form, *(Path(name).name.replace(":", "-") for name in (target, draft))]
        folder = place / "-".join(["bundle", *names])
        folder.mkdir(exist_ok=True)
        with alone(folder / "lock"):
            if (folder / "bundle").exists():
                return folder / "bundle"
            return export_bundle(folder, operators, form, target, draft)

    return get


@pytest.fixture
def bundle(bundles: Callable[..., Path], operators: Operators) -> Callable[..., Path]:
    """``bundles`` for the operators of this test."""
    return partial(bundles, operators)


@pytest.fixture(scope="session")
def engines(bundles: Callable[..., Path]) -> Callable[..., Engine]:
    """(operators, format, target, draft) -> an engine over that bundle, for tests that do not mind what it has seen."""
    made: dict[tuple[str, ...], Engine] = {}

    def get(operators: Operators, *wanted: str) -> Engine:
        key = operators, *wanted
        if key not in made:
            made[key] = load(bundles(*key), threads=THREADS, operators=operators)
        return made[key]

    return get


@pytest.fixture
def engine(engines: Callable[..., Engine], operators: Operators) -> Callable[..., Engine]:
    """``engines`` for the operators of this test."""
    return partial(engines, operators)


def write_large(folder: Path, config: dict[str, Any]) -> int:
    """Write a random bfloat16 checkpoint in several shards, one shard in memory at a time; give the parameters."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    random, names, total = np.random.default_rng(0), {}, 0
    for number, (name, shape) in enumerate(hf.shapes(config).items()):
        file = f"part-{number:03}.safetensors"
        block = (random.standard_normal(1 << 16, np.float32) * 0.03).astype(ml_dtypes.bfloat16)
        save_file({name: np.resize(block, shape)}, folder / file)
        names[name] = file
        total += int(np.prod(shape))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), "utf-8")
    return total
