"""The tutorial: its code runs from the first line to the last, and the user gets its texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from tests.test_recipes import says

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"


def test_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    report, message = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)  # the code leaves folders and loggers to Lightning's defaults
    script = tmp_path / "tutorial.py"
    script.write_text("".join(blocks))
    found: dict[str, Any] = {"__name__": "tutorial"}
    exec(compile(script.read_text(), str(script), "exec"), found)
    assert says(caplog.text, report)
    assert says(caplog.text, message)  # trained on eagerly, with the reason
    assert [*(tmp_path / "runs").rglob("events.out.tfevents.*")]
    trainer = found["Trainer"](max_epochs=1, logger=False, callbacks=[CUDAGraphCallback()])
    with pytest.raises(CaptureError) as caught:
        trainer.fit(found["Reading"](), found["loader"])
    assert says(str(caught.value), message)
