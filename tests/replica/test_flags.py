"""Flags that are wrong by themselves, and the help text of all."""

import pytest

from replica.flags import parser


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--port", "70000"], "a port is a number from 0 to 65535, not '70000'"),
        (["--kv-tokens", "0"], "a whole number above 0, not '0'"),
        (["--prefill-rate", "nan"], "a number above 0, not 'nan'"),
        (["--fault-errors", "1.5"], "a share is a number from 0 to 1, not '1.5'"),
        (["--fault-breaks", "nan"], "a share is a number from 0 to 1, not 'nan'"),
        (["--prefill-chunk", "-1"], "a whole number, 0 or more, not '-1'"),
        (["--coalesce-ms", "-1"], "a number, 0 or more, not '-1'"),
        (["--count", "0"], "a whole number above 0, not '0'"),
        (["--engine", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_wrong_flags(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(args)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_of_every_flag_has_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    options = capsys.readouterr().out.split("\n  --")[1:]
    assert len(options) >= 14
    for option in options:
        assert "default" in option or option.startswith(("prepare-only", "help")), option


@pytest.mark.parametrize("flags", [["--max-queue", "0"], ["--send-timeout", "0"]])
def test_limits_that_are_none(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(flags)
    assert "above 0" in capsys.readouterr().err
