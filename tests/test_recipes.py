"""The recipes of docs/recipes: each form of a page does what the page says.

The name of a class says what to expect of it:

- `Fails...` is refused by the callback. The text block that follows is in the message.
- `Slow...` trains to the same numbers as without the callback. The text is in the report.
- `Works...` trains to the same numbers, with nothing but replays after its warm-up, and the report has
  none of the texts of the page.

In a text, `...` is anything.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributions import Distribution
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback, GraphedStep, UnsupportedError
from tests.harness import Trace, assert_same, differences, make, train

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
PAGES = sorted(path for path in RECIPES.glob("*.md") if path.stem != "index")
MAX_LINES = 60
# What these show is refused for what the code does, which has a page of its own.
BY_ANOTHER = {
    "accumulation": ("paths",),
    "augmentation": ("host_random",),
    "early_exit": ("item_and_print",),
    "loops": ("loops", "indices_and_lengths"),
}


@dataclass
class Form:
    """A code block of a page, and the text that the user gets from it."""

    code: str
    text: str = ""
    title: str = ""

    @property
    def names(self) -> list[str]:
        """The modules that it defines."""
        return re.findall(r"^class (\w+)", self.code, re.MULTILINE)


def forms(page: Path) -> list[Form]:
    found: list[Form] = []
    is_block = re.compile(
        r'^```(python|text)(?: title="([^"\n]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
    )
    for language, title, block in is_block.findall(page.read_text()):
        if language == "python":
            found.append(Form(block))
        else:
            assert not found[-1].text, f"{page.name}: two texts of one form"
            found[-1].text, found[-1].title = block, title
    return found


@pytest.fixture(autouse=True)
def checks_of_distributions() -> Iterator[None]:
    """Once something is compiled, torch leaves them out for the rest of the process."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


CASES = [
    pytest.param(page, name, id=f"{page.stem}-{name}")
    for page in PAGES
    for form in forms(page)
    for name in form.names
]


def says(text: str, pattern: str) -> bool:
    """True if a text has the pattern somewhere; line breaks are blanks."""
    parts = [re.escape(" ".join(part.split())) for part in pattern.split("...")]
    return re.search(".*".join(parts), " ".join(text.split())) is not None


def _batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, 16, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(4, (80,), generator=generator)), batch_size=8)


def _fit(trainer: pl.Trainer, module: Any, train_loader: Any, _: Any, **kwargs: Any) -> None:
    """Without validation, and with the batches of the module where it has some."""
    has_own = type(module).train_dataloader is not pl.LightningModule.train_dataloader
    trainer.fit(module, None if has_own else train_loader, **kwargs)


def run(
    page: Path, name: str, folder: Path, *, graphs: bool, refused: bool = False
) -> tuple[Form, Trace]:
    """Train a module of a page, which comes behind the code of the index in one script.

    Where a page uses `GraphedStep`, the forms that work have no callback.
    """
    folder.mkdir()
    torch.manual_seed(1)  # pages make data
    script = [*forms(RECIPES / "index.md"), *forms(page)]
    path = folder / "script.py"  # messages quote its lines
    path.write_text("".join(form.code for form in script))
    trainers: list[dict[str, Any]] = []
    found: dict[str, Any] = {"__name__": "script"}
    lines_before = 0
    for form in script:
        trainers.clear()
        exec(compile("\n" * lines_before + form.code, str(path), "exec"), found)
        found["Trainer"] = lambda **options: trainers.append(options)  # made by the harness
        if "GraphedStep" in found and not graphs:
            found["GraphedStep"] = partial(GraphedStep, backend="off")
        lines_before += form.code.count("\n")
        if name in form.names:
            break
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": [CUDAGraphCallback()]}
    for own in trainers:
        options.update(own)
    (callback,) = options.pop("callbacks")
    has_callback = graphs and (refused or "GraphedStep" not in found)
    if callback.pad_to and not graphs:
        callback.backend, has_callback = "off", True
    trace = train(
        make(found[name]),
        folder,
        callback if has_callback else None,
        train_loader=_batches(),
        checkpoint_every=0,
        watched=False,
        raises=UnsupportedError if refused else None,
        fit=_fit,
        enable_checkpointing=False,
        **options,
    )
    return form, trace


@pytest.mark.spread
@pytest.mark.parametrize(("page", "name"), CASES)
def test_each_form_does_what_its_page_says(page: Path, name: str, tmp_path: Path) -> None:
    _, plain = run(page, name, tmp_path / "plain", graphs=False)
    is_refused = name.startswith("Fails")
    form, trace = run(page, name, tmp_path / "graphs", graphs=True, refused=is_refused)
    if is_refused:
        assert type(trace.error).__name__ == form.title
        assert says(str(trace.error), form.text), f"page: {form.text}\nmessage: {trace.error}"
        linked = re.findall(r"docs/recipes/(\w+)\.md", str(trace.error))[0]
        assert linked in BY_ANOTHER.get(page.stem, (page.stem,))
        return
    assert_same(trace, plain)
    steps = [part for part in vars(trace.module).values() if isinstance(part, GraphedStep)]
    summary = steps[0].summary if steps else trace.callback.summary
    (stage,) = summary.stages.values()
    assert stage.replayed > 0 or name.startswith("Slow"), summary
    if name.startswith("Slow"):
        assert form.title == "In the report"
        assert says(str(summary), form.text), f"page: {form.text}\nreport: {summary}"
    else:
        assert not stage.eager, summary
        assert not [text for text in _texts(page) if says(str(summary), text)], summary


def test_a_number_logged_before_the_step_is_that_of_the_step(tmp_path: Path) -> None:
    page = RECIPES / "logged_values.md"
    _, refused = run(page, "FailsOnLearningRate", tmp_path / "plain", graphs=False)
    _, works = run(page, "Works", tmp_path / "graphs", graphs=True)
    rates, steps = _column(works, "lr"), _column(works, "step")
    assert rates == _column(refused, "lr")
    assert steps == [float(step) for step in range(10)]
    assert len(set(rates)) == len(steps)


def test_a_tensor_in_place_of_a_number_has_its_bits(tmp_path: Path) -> None:
    page = RECIPES / "python_numbers.md"
    _, plain = run(page, "Slow", tmp_path / "plain", graphs=False)
    _, works = run(page, "Works", tmp_path / "graphs", graphs=True)
    of_numbers, of_tensors = (dict(each.module.named_parameters()) for each in (plain, works))
    assert not differences(of_numbers, of_tensors)


def test_layers_of_two_directions_are_those_of_packed_sequences() -> None:
    scope: dict[str, Any] = {}
    for form in (*forms(RECIPES / "index.md"), *forms(RECIPES / "packed_sequences.md")):
        exec(form.code, scope)
    module = scope["WorksInTwoDirections"]()
    module.log = lambda *args: None
    whole = torch.nn.GRU(4, 8, num_layers=2, bidirectional=True, batch_first=True)
    for layer in range(2):
        for one, suffix in ((module.ahead[layer], ""), (module.back[layer], "_reverse")):
            for name, value in one.named_parameters():
                getattr(whole, name.replace("_l0", f"_l{layer}{suffix}")).data.copy_(value)
    x, y = torch.randn(6, 16), torch.tensor([3, 0, 1, 2, 3, 0])
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        x.reshape(-1, 4, 4), y + 1, batch_first=True, enforce_sorted=False
    )
    _, hidden = whole(packed)
    expected = module.layer(torch.cat([hidden[-2], hidden[-1]], 1))
    loss = module.training_step((x, y), 0)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(expected, y))


def _functions(page: str) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    for form in (*forms(RECIPES / "index.md"), *forms(RECIPES / f"{page}.md")):
        exec(form.code, scope)
    return scope


def _moments(angles: torch.Tensor) -> torch.Tensor:
    return torch.stack([angles.cos(), angles.sin(), (2 * angles).cos(), (2 * angles).sin()]).mean(1)


@pytest.mark.parametrize("concentration", [0.01, 2.0, 1000.0])
def test_samples_written_out_are_those_of_torch(concentration: float) -> None:
    torch.manual_seed(0)
    own = _functions("distribution_samples")
    loc, k = torch.full((20_000,), 2.5), torch.full((20_000,), concentration)
    angles, expected = own["von_mises"](loc, k), torch.distributions.VonMises(loc, k).sample()
    torch.testing.assert_close(_moments(angles), _moments(expected), rtol=0, atol=0.02)
    assert angles.abs().max() <= torch.pi
    loc, scale = torch.randn(8, 4), torch.rand(8, 4)
    torch.manual_seed(concentration)
    shares = own["logistic_normal"](loc, scale)
    torch.manual_seed(concentration)
    expected = torch.distributions.LogisticNormal(loc, scale).rsample()
    torch.testing.assert_close(shares, expected)


def test_entropies_written_out_are_those_of_torch() -> None:
    own = _functions("distribution_entropies")
    probs = torch.rand(3, 8, 4).softmax(-1)
    for trials in (1, 5):
        counts = torch.distributions.Binomial(trials, probs).entropy()
        assert torch.equal(own["binomial_entropy"](trials, probs), counts)
        counts = torch.distributions.Multinomial(trials, probs).entropy()
        torch.testing.assert_close(own["multinomial_entropy"](trials, probs), counts)


def test_matrices_written_out_are_those_of_torch() -> None:
    torch.manual_seed(0)
    own = _functions("wishart")
    df, factor = torch.full((50_000,), 5.5), torch.linalg.cholesky(torch.eye(3) + 0.5)
    drawn = own["wishart"](df, factor)
    law = torch.distributions.Wishart(df, scale_tril=factor)
    torch.testing.assert_close(drawn.mean(0), law.mean[0], rtol=0.02, atol=0)
    torch.testing.assert_close(drawn.var(0), law.variance[0], rtol=0.05, atol=0)
    torch.testing.assert_close(own["wishart_log_prob"](df, factor, drawn), law.log_prob(drawn))


def _column(trace: Trace, name: str) -> list[float]:
    """Values logged under a name, in order."""
    rows = [*csv.DictReader(trace.csv.splitlines())]
    return [float(row[name]) for row in rows if row.get(name)]


def _texts(page: Path) -> list[str]:
    return [form.text for form in forms(page) if form.text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_has_both_forms(page: Path) -> None:
    assert len(page.read_text().splitlines()) < MAX_LINES
    kinds = set()
    for form in forms(page):
        for name in form.names:
            (kind,) = re.findall("^(?:Fails|Slow|Works)", name)
            kinds.add(kind)
            assert bool(form.text) == (kind != "Works"), name
    assert "Works" in kinds
    assert kinds & {"Fails", "Slow"}


def test_the_index_names_every_page() -> None:
    linked = re.findall(r"\]\((\w+)\.md\)", (RECIPES / "index.md").read_text())
    assert sorted(linked) == [page.stem for page in PAGES]
