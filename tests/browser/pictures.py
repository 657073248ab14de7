"""Take the pictures of the README of finished runs.

Charts and tables come from the tabs of TensorBoard, and the images of one run as they are.

    python -m tests.browser.pictures runs docs --run graph --time-series "layer_.*/head$|step_ms"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.browser.tabs import (
    chromium,
    new_tab,
    picture,
    show_filtered,
    show_time_series,
    tensorboard_on,
)


def save_images(logdir: Path, run: str, folder: Path) -> None:
    """Save the last images of a run as they are: in their tab they are small."""
    events = EventAccumulator(str(logdir / run), size_guidance={"images": 0})
    events.Reload()
    for tag in events.Tags()["images"]:
        image = events.Images(tag)[-1].encoded_image_string
        (folder / f"{Path(tag).name}.png").write_bytes(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir", type=Path, help="where the runs lie")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--run", required=True, help="whose tables and images are shown")
    parser.add_argument("--time-series", default="step_ms", help="the tags shown there")
    parser.add_argument("--texts", default="layers", help="the tags of texts that are shown")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    save_images(args.logdir, args.run, args.folder)
    with chromium() as browser:
        with tensorboard_on(args.logdir) as address:
            tab = new_tab(browser, 1680, 1172)
            show_time_series(tab, address, args.time_series)
            picture(tab, args.folder / "dashboard.png")
            tab = new_tab(browser, 1400, 780)
            show_filtered(tab, address, "custom_scalars", "", ["CUDA graph"])
            picture(tab, args.folder / "custom_scalars.png")
        with tensorboard_on(args.logdir / args.run) as address:
            tab = new_tab(browser, 1400, 900)
            show_filtered(tab, address, "text", args.texts, [])
            picture(tab, args.folder / "text.png")


if __name__ == "__main__":
    main()
