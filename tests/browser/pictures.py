"""Take the pictures of README and docs: the tabs of TensorBoard, of finished runs.

Call it from the folder of the runs: TensorBoard shows the path that it is given.

python -m tests.browser.pictures runs docs --run graph
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

CURVES = r"train_loss_step|~step_ms/(forward|total)|~layer_.*ms/(blocks|head)$|~step_time_ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir", type=Path, help="where the runs lie")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--run", required=True, help="whose tags, texts and images are shown")
    parser.add_argument("--curves", default=CURVES, help="the tags shown in the tab Time Series")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        with tensorboard_on(args.logdir) as address:
            tab = new_tab(browser, 1680, 1172)
            show_time_series(tab, address, args.curves)
            picture(tab, args.folder / "dashboard.png")
            tab = new_tab(browser, 1640, 1000)
            show_filtered(tab, address, "custom_scalars", "", ["CUDA graph"])
            picture(tab, args.folder / "custom_scalars.png")
        with tensorboard_on(args.logdir / args.run) as address:
            for plugin, pattern, text, size in (
                ("scalars", "", "~step_ms", (1400, 1260)),
                ("images", "", "~cudagraph/timeline", (1120, 540)),
                ("text", "layers", "tag: ~cudagraph/layers/text_summary", (1400, 740)),
            ):
                tab = new_tab(browser, *size)
                show_filtered(tab, address, plugin, pattern, [text])
                picture(tab, args.folder / f"{plugin}.png")


if __name__ == "__main__":
    main()
