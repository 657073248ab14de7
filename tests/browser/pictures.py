"""Take the pictures of the README of finished runs.

python -m tests.browser.pictures runs docs --time-series "layer_.*/(blocks.[05]|head)$|step_ms"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.browser.tabs import (
    chromium,
    new_tab,
    picture,
    show_filtered,
    show_time_series,
    tensorboard_on,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir", type=Path, help="where the runs lie")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--time-series", default="step_ms", help="the tags shown there")
    parser.add_argument("--texts", default="layers", help="the tags of texts that are shown")
    parser.add_argument("--images", default="", help="the tags of images that are shown")
    args = parser.parse_args()
    with tensorboard_on(args.logdir) as address, chromium() as browser:
        tab = new_tab(browser, 1680, 1130)
        show_time_series(tab, address, args.time_series)
        picture(tab, args.folder / "dashboard.png")
        for plugin, pattern in (
            ("custom_scalars", ""),
            ("text", args.texts),
            ("images", args.images),
        ):
            tab = new_tab(browser)
            show_filtered(tab, address, plugin, pattern, [])
            picture(tab, args.folder / f"{plugin}.png")


if __name__ == "__main__":
    main()
