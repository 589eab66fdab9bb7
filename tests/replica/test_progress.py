"""What a log shows of a progress bar."""

import io

import pytest

from replica.progress import EVERY_S, BarLines


def test_a_bar_becomes_a_line_for_each_step_and_every_few_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    lines = BarLines(out, lambda: now[0])
    for text in ("\rone: fetching  |##  | 1/5 [00:00]", "\r", "\rone: fetching  |##  | 1/5 [00:01]"):
        lines.write(text)
    now[0] = EVERY_S
    lines.write("\rone: fetching  |##  | 1/5 [00:05]")
    lines.write("\rone: unpacking |### | 2/5 [00:05]")
    for text in ("\n", "\rtensors:   0%|  | 0/272", "\x1b[A", "\n", "\rtensors:   5%|# | 13/272", "\x1b[A"):
        lines.write(text)
    lines.write("\rone: unpacking |### | 2/5 [00:06]")
    lines.write("\n")
    lines.write("Another process is preparing the model.\n")
    assert out.getvalue().splitlines() == [
        "one: fetching  |##  | 1/5 [00:00]",
        "one: fetching  |##  | 1/5 [00:05]",
        "one: unpacking |### | 2/5 [00:05]",
        "tensors:   0%|  | 0/272",
        "Another process is preparing the model.",
    ]


def test_it_takes_the_bar_of_tqdm() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    out = io.StringIO()
    with tqdm(total=3, bar_format="{desc}|{bar:5}| {n_fmt}/{total_fmt}", file=BarLines(out)) as bar:
        for name in ("first", "second", "third"):
            bar.set_description_str(name)
            bar.update()
    assert [line.split("|")[0] for line in out.getvalue().splitlines()][1:] == ["first", "second", "third"]
