"""Report sections about the draft model: the states it learns from, its training, its acceptance."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from eagle3.artifacts import Stage
from eagle3.records import JsonObject
from eagle3.report import svg
from eagle3.report.markup import charts, flat, section, table
from eagle3.report.reading import RunView, as_mapping, at, integer, number


def gates_section(view: RunView) -> str:
    """Show the figures of the gates and the contract of the hidden states."""
    gates = as_mapping(view.stats(Stage.HIDDEN_STATES).get("gates"))
    contract = as_mapping(view.stats(Stage.HIDDEN_STATES).get("contract"))
    rows = [[name, flat(value)] for name, value in gates.items()]
    facts = [[name, flat(value)] for name, value in contract.items()]
    stats = view.stats(Stage.HIDDEN_STATES)
    figures = [[name, stats[name]] for name in ("samples", "tokens", "bytes", "tokens_per_s") if name in stats]
    return section(
        "gates",
        "Hidden states and their gates",
        table(["gate", "found"], rows),
        table(["store", "value"], [*figures, *facts]),
    )


def training_section(view: RunView) -> str:
    """Show the loss: as sealed, or as far as progress tells."""
    stats, events = view.stats(Stage.DRAFT), view.events_of(Stage.DRAFT)
    training, validation = _points(stats.get("loss_curve")), _validation_points(stats)
    if not training:
        training, validation = (
            sorted(
                (entry.event.done, loss)
                for entry in events
                if (loss := number(entry.event.values.get(key))) is not None
            )
            for key in ("loss", "validation_loss")
        )
    curves = [svg.Series(name="training", points=training), svg.Series(name="validation", points=validation)]
    picture = svg.line_chart("Loss", curves, x_label="steps", y_label="loss") if training else ""
    epochs = [
        [1 + (integer(at(entry, "epoch")) or 0), number(at(entry, "loss")), flat(at(entry, "accuracy") or [])]
        for entry in stats.get("validation") or ()
    ]
    rows = [[key, flat(value)] for key, value in stats.items() if key not in ("loss_curve", "validation")]
    return section(
        "training",
        "Training",
        charts(picture),
        table(["validation after epoch", "loss", "accuracy per chained step"], epochs, (1,)),
        table(["figure", "value"], rows),
    )


def _points(value: object) -> Sequence[tuple[float, float]]:
    pairs = cast("Sequence[tuple[object, object]]", value or ())
    return [(number(step) or 0.0, loss) for step, found in pairs if (loss := number(found)) is not None]


def _validation_points(stats: Mapping[str, Any]) -> Sequence[tuple[float, float]]:
    """Place the validation loss of every epoch at the step that ended it."""
    epochs, steps = stats.get("validation") or (), number(stats.get("steps")) or 0.0
    losses = [number(at(entry, "loss")) for entry in epochs]
    ends = [steps * (index + 1) / len(losses) for index in range(len(losses))]
    return [(end, loss) for end, loss in zip(ends, losses, strict=True) if loss is not None]


def acceptance_section(view: RunView) -> str:
    """Show what share of the draft's tokens the target accepts, by position and dataset."""
    stats: JsonObject = {**view.evaluation, **view.stats(Stage.EVALUATION)}
    trained, untrained = (
        _rates(stats.get("acceptance_by_position")),
        _rates(stats.get("acceptance_by_position_untrained")),
    )
    if not trained:
        return section("acceptance", "Acceptance")
    series: dict[str, Sequence[float]] = {"trained": trained}
    if untrained:
        series["untrained"] = [*untrained, *[0.0] * (len(trained) - len(untrained))][: len(trained)]
    picture = svg.bar_chart(
        "Accepted draft tokens by position",
        [f"token {index + 1}" for index in range(len(trained))],
        series,
        x_label="position in the draft",
        y_label="acceptance rate",
    )
    rows = [[key, flat(value)] for key, value in stats.items() if key not in ("schema", "datasets")]
    datasets = [
        [name, number(at(entry, "acceptance_length")), integer(at(entry, "rounds"))]
        for name, entry in as_mapping(stats.get("datasets")).items()
    ]
    return section(
        "acceptance",
        "Acceptance",
        charts(picture),
        table(["dataset", "acceptance length", "rounds"], datasets, (1, 2)),
        table(["figure", "value"], rows),
    )


def _rates(value: object) -> Sequence[float]:
    return [number(rate) or 0.0 for rate in cast("Sequence[object]", value)] if isinstance(value, list) else []
