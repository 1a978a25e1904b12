"""A training as a picture: the loss of every step, and held-out accuracy."""

from __future__ import annotations

from pathlib import Path

from edgespec.export.training.loop import History


def draw(history: History, path: Path, title: str) -> None:
    """Write a PNG with the loss, and below it the held-out top-1 accuracy of each head."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    above.plot(range(1, len(history.losses) + 1), history.losses, color="#3b7dd8", linewidth=0.8)
    above.set_ylabel("loss, nats")
    above.set_title(title, parse_math=False)  # a $ in a name is a $
    steps = sorted(history.accuracy)
    for head in range(len(history.accuracy[steps[0]]) if steps else 0):
        below.plot(steps, [history.accuracy[step][head] for step in steps], marker="o", label=str(head))
    if steps:
        below.legend(title="head")
    below.set_ylabel("held-out top-1")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
