"""The README: its length, its order, its code, its commands and figures; the links of all pages."""

from __future__ import annotations

import logging
import re
import runpy
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.trainer.command import main
from tests.harness import differences

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_WORDS = 900
ORDER = [
    "# lightning_cudagraph",
    "```diff",
    "## Install",
    "## How fast",
    "## What you see",
    "## When it helps, and when not",
    "## What a step may do",
    "## More",
]
# What readers would have to decode.
RIDDLES = ["as it comes", "the host decides", "stands in for", "anew", "somebody", "nobody"]
# The rows of the README's table, as docs/beside_other_ways.md calls them.
MODELS = {
    "GPT, 6 layers of 384": "GPT",
    "BERT-base": "BERT-base",
    "ResNet-18": "ResNet-18",
    "DLRM, 26 tables, batch 128": "DLRM 128",
    "GPT, 4 layers of 2048, compute-bound": "compute-bound GPT",
}


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_length() -> None:
    """As `wc -w` counts, with code blocks, tables and addresses of links."""
    assert len(README.split()) <= MAX_WORDS


def test_order() -> None:
    is_heading = re.compile(r"^(#+ .*|```diff)$", re.MULTILINE)
    assert is_heading.findall(README) == ORDER
    promise = README.split("\n\n")[1]
    assert promise.endswith(".")
    assert ". " not in promise.replace("\n", " ")
    for earlier, later in (("```diff", 'pip install -e ".[examples]"'), ("|---", "dashboard.png")):
        assert README.index(earlier) < README.index(later)


@pytest.mark.parametrize("riddle", RIDDLES)
def test_plain_words(riddle: str) -> None:
    assert not re.search(rf"\b{riddle}\b", README, re.IGNORECASE)


def test_the_difference_is_the_callback() -> None:
    (diff,) = blocks(README, "diff")
    minus, plus = diff.splitlines()
    assert (minus[0], plus[0]) == ("-", "+")
    argument = "callbacks=[CUDAGraphCallback()]"
    assert plus[1:].replace(argument, "") == minus[1:]
    found: dict[str, Any] = {"Trainer": Trainer, "CUDAGraphCallback": CUDAGraphCallback}
    exec(plus[1:].strip(), found)
    assert any(isinstance(callback, CUDAGraphCallback) for callback in found["trainer"].callbacks)


class _Random(LightningDataModule):
    """Five batches of one shape."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(40, 16, generator=generator)
        y = torch.randint(4, (40,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=8)


def test_the_code_trains_the_same_as_without_the_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, module = blocks(README, "python")
    monkeypatch.chdir(tmp_path)  # the code leaves folders and loggers to Lightning's defaults
    path = tmp_path / "script.py"
    path.write_text(f"{module}\n\nmodule = Net()\n{script}")
    found = {}
    for callbacks in ("[CUDAGraphCallback()]", "[]"):
        text = path.read_text().replace("[CUDAGraphCallback()]", callbacks)
        path.write_text(text)
        seed_everything(5, verbose=False)
        found[callbacks] = runpy.run_path(str(path), {"datamodule": _Random()}, "script")
    graph, plain = found.values()
    (callback,) = [c for c in graph["trainer"].callbacks if isinstance(c, CUDAGraphCallback)]
    assert callback.summary.fit.captures == 1
    assert callback.summary.fit.replayed == 50 - 3
    assert not differences(graph["module"].state_dict(), plain["module"].state_dict())
    assert graph["module"].noise == plain["module"].noise == torch.tensor(0.1 / 50)


def test_the_loop_of_your_own(tmp_path: Path) -> None:
    (block,) = blocks((ROOT / "docs" / "graphed_step.md").read_text(), "python")
    path = tmp_path / "loop.py"
    path.write_text(block)
    model = torch.nn.Linear(16, 4)
    before = model.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {
        "F": F,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
        "loader": _Random().train_dataloader(),
    }
    step = runpy.run_path(str(path), given, "loop")["step"]
    assert (step.summary.calls.warmed_up, step.summary.calls.replayed) == (3, 2), step.summary
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_python_compiles(path: Path) -> None:
    for block in blocks(path.read_text(), "python"):
        compile(block, str(path), "exec")


def test_the_config_is_one_of_lightning_cli(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-cudagraph"])
    (block,) = blocks((ROOT / "docs" / "arguments.md").read_text(), "yaml")
    config = tmp_path / "config.yaml"
    config.write_text(block)
    configs = [ROOT / "configs" / "char_gpt.yaml", ROOT / "configs" / "char_gpt_cpu.yaml", config]
    arguments = [argument for path in configs for argument in ("--config", str(path))]
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *arguments, "--print_config"])
    assert "- blocks.?" in capsys.readouterr().out


def test_its_commands_are_those_that_are_run() -> None:
    example, test = (block.strip() for block in blocks(README, "bash"))
    assert f"\n# The README's second command.\n{test}\n" in (ROOT / ".ci" / "run").read_text()
    assert f"\n{test}\n" in (ROOT / "CONTRIBUTING.md").read_text()
    installed, _, script = example.partition(" && ")
    assert script == "python examples/char_gpt.py fit"
    assert f"\n    {script}\n" in (ROOT / "examples" / "char_gpt.py").read_text()
    extras = metadata("lightning_cudagraph").get_all("Provides-Extra")
    for command in (installed, test.partition(" && ")[0]):
        found = re.fullmatch(r'pip install -e "\.\[(\w+)\]"', command)
        assert found is not None, command
        assert found[1] in (extras or [])


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The command after the installation, on fewer steps."""
    (example, _) = blocks(README, "bash")
    _, script, subcommand = example.partition(" && ")[2].split()
    fewer = ["--trainer.max_steps=8", "--trainer.limit_val_batches=0", "--model.sample_chars=0"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend((ROOT / script).parent)
    monkeypatch.setattr(sys, "argv", [script, subcommand, *fewer])
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert "lightning_cudagraph: 5 of 8 steps replayed (62.5%)" in caplog.text
    assert f"tensorboard --logdir {(tmp_path / 'runs').name}" in README
    assert [*(tmp_path / "runs").rglob("events.out.tfevents.*")]


def _table(page: str) -> dict[str, dict[str, str]]:
    """The first table that has a column of eager steps: rows and columns by name."""
    rows = [
        [cell.strip(" *") for cell in line.strip().strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    start = next(i for i, row in enumerate(rows) if "eager Lightning" in row)
    names, _, *cells = rows[start:]
    end = next((i for i, row in enumerate(cells) if len(row) != len(names)), len(cells))
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in cells[:end]}


def test_the_figures_are_those_of_the_benchmarks() -> None:
    ours = _table(README)
    all_of_them = _table((ROOT / "docs" / "beside_other_ways.md").read_text())
    columns = {
        "eager Lightning": "eager Lightning",
        "`reduce-overhead`": "torch.compile, reduce-overhead",
        "this callback": "callback, data flow",
    }
    more = []
    for (row, cells), (beginning, model) in zip(ours.items(), MODELS.items(), strict=True):
        assert row.startswith(beginning)
        measured = {column: value.split()[0] for column, value in all_of_them[model].items()}
        for column, value in cells.items():
            assert value == measured[columns[column]], f"{row}: {column}"
        timed = measured["callback, as it comes"]
        more.append(int(timed) / int(measured["callback, data flow"]))
        if model.startswith("DLRM"):
            without = measured["callback, data flow"]
            said = f"DLRM then takes {timed} instead of {without}"
            assert said in README.replace("\n", " ")
    assert sum(ratio > 1.013 for ratio in more) == 1  # DLRM, as is said below the table


def _slugs(page: str) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links(path: Path) -> None:
    """Each relative link leads to a file of this project, and to a heading that is there."""
    page = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", page):
        if re.match(r"[a-z]+:", link):
            continue
        address, _, anchor = link.partition("#")
        target = (path.parent / address).resolve() if address else path
        assert target.is_file(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in _slugs(target.read_text()), link


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    left = [ROOT / "README.md"]
    while left:
        path = left.pop()
        if path not in seen and path.suffix == ".md":
            seen.add(path)
            links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
            left += [(path.parent / link).resolve() for link in links]
    assert not {*PAGES} - seen


def test_pages_named_in_code_are_there() -> None:
    for folder in ("lightning_cudagraph", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/\w+\.\w+", path.read_text()):
                assert (ROOT / page).is_file(), f"{name(path)}: {page}"
