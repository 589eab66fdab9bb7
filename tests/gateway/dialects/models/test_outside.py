"""The model in forms and queries: found wherever it stands, in bounded steps, and nothing else is taken for it."""

from __future__ import annotations

import email.parser
import email.policy
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.dialects.api_request import MAX_MODEL_CHARS
from gateway.dialects.models.outside import MAX_HEAD, MAX_PARTS, FormModel, form_model, is_usual, query_models

TYPE = "multipart/form-data; boundary=B"


def part(name: str, value: bytes, *more: str, after: str = "") -> bytes:
    return "\r\n".join([f"Content-Disposition: form-data; {name}{after}", *more, "", ""]).encode() + value


def form(*parts: bytes, boundary: str = "B") -> bytes:
    line = f"--{boundary}".encode()
    return b"".join(line + b"\r\n" + each + b"\r\n" for each in parts) + line + b"--\r\n"


def found(body: bytes, content_type: str = TYPE, step_bytes: int = 1 << 20) -> str:
    made = form_model(body, content_type, step_bytes)
    if made is None:
        return "no form"
    while made.step():
        pass
    return made.name


FILE = part('name="file"; filename="model"', b"RIFF\r\n\r\n--\r\n--A\r\nmodel" * 999, "Content-Type: audio/wav")
MODEL = part('name="model"', b"whisper-1")


@pytest.mark.parametrize("step_bytes", [1, 100, 1 << 20])
def test_before_and_behind_a_large_file(step_bytes: int) -> None:
    for body in (form(MODEL, FILE), form(FILE, MODEL), form(FILE, FILE, MODEL, FILE)):
        assert found(body, step_bytes=step_bytes) == "whisper-1"


names = st.sampled_from(["model", "Model", "file", "models", "model;x", ""])
values = st.sampled_from(
    [b"", b"m", b"whisper-1", b"a\r\nb", b"--B", b"\r\n--", "é".encode(), b"x" * 300, b"\r\n\r\n", b"--B--", b"a\r\n--Bx\r\n"]
)
fields = st.tuples(names, values, st.booleans(), st.sampled_from([(), ("Content-Type: text/plain",), ("X-A: name=model",)]))


@given(st.lists(fields, max_size=5), st.integers(1, 40), st.booleans())
@example([("model", b"", False, ()), ("model", b"m", False, ())], 3, False)
def test_it_is_what_another_parser_finds(parts: list[tuple[str, bytes, bool, tuple[str, ...]]], step: int, last: bool) -> None:
    """The oracle: the standard library's parser of e-mails."""
    body = form(
        *(part(f'name="{name}"', value, *more, after='; filename="f"' if file else "") for name, value, file, more in parts)
    )
    if last:
        body = body[:-2]  # without the last line's end
    head = b"Content-Type: " + TYPE.encode() + b"\r\n\r\n"
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    wanted = ""
    for each in message.iter_parts() if message.is_multipart() else ():
        if each.get_param("name", header="content-disposition") == "model" and each.get_filename() is None:
            value = each.get_payload(decode=True) or b""
            assert isinstance(value, bytes)
            if 0 < len(value) <= MAX_MODEL_CHARS:
                wanted = value.decode()
    if any(b"--B" in value or b"\r\n" in value for _, value, _, _ in parts):
        found(body, step_bytes=step)  # e-mails' line ends are not a form's; it ends
    else:
        assert found(body, step_bytes=step) == wanted


@given(st.binary(max_size=300) | st.lists(st.sampled_from([b"--B", b"\r\n", b"--", b'name="model"', b":", b"m"]), max_size=40))
def test_any_body_ends_with_the_same_model_in_short_steps(body: bytes | list[bytes]) -> None:
    whole = body if isinstance(body, bytes) else b"".join(body)
    assert found(whole, step_bytes=7) == found(whole)


@pytest.mark.parametrize(
    ("header", "model"),
    [
        ('name="model"', "m"),
        ("name=model", "m"),
        ("name=model ; x=y", "m"),
        ('x=y; name="model"', "m"),
        ("name=models", ""),
        ('name="models"', ""),
        ('xname="model"', ""),
        ('filename="name=model"', ""),
        ('name="model"; filename="f"', ""),
        ("filename*=utf-8''f; name=model", ""),
        ('name="model', ""),
    ],
)
def test_the_field_s_name(header: str, model: str) -> None:
    assert found(form(part(header, b"m"))) == model
    assert found(form(part(header, b"m").replace(b"Content-Disposition: ", b"content-DISPOSITION:"))) == model


@pytest.mark.parametrize(
    ("content_type", "model"),
    [
        (TYPE, "whisper-1"),
        ('multipart/form-data; charset=utf-8; boundary="B"', "whisper-1"),
        ("Multipart/Form-Data;BOUNDARY=B", "whisper-1"),
        ("multipart/form-data; boundary=C", ""),
        ("multipart/form-data", "no form"),
        ("multipart/mixed; boundary=B", "no form"),
        ("application/json", "no form"),
        ("", "no form"),
        (f"multipart/form-data; boundary={'B' * 300}", ""),
    ],
)
def test_the_content_type(content_type: str, model: str) -> None:
    assert found(form(MODEL), content_type) == model
    assert found(b"", content_type) == "no form"


ODD = {
    "a parameter like a file's": form(part('name="model"; xfilename=1', b"m")),
    "a space behind the sign": form(part('name= "model"', b"m")),
    "no quotes": form(part("name=model", b"m")),
    "another name first": form(part('x=y; name="model"', b"m")),
    "two fields": form(MODEL, MODEL),
    "two fields in two cases": form(MODEL, part('name="Model"', b"m")),
    "a file of that name": form(part('name="model"; filename="f"', b"m")),
    "two dispositions": form(part('name="x"', b"m", 'Content-Disposition: form-data; name="model"')),
    "a folded line": form(part('name="x"', b"m", "X-A: b", ' name="model"')),
    "an encoding": form(part('name="model"', b"bQ==", "Content-Transfer-Encoding: base64")),
    "a backslash": form(part('name="x\\"; y="; name="model"', b"m")),
    "padding": form(MODEL).replace(b"--B\r", b"--B \r"),
    "line feeds": form(MODEL) + form(MODEL).replace(b"\r\n", b"\n"),
    "a second form": form(MODEL) + form(MODEL),
    "like a delimiter": form(MODEL, part('name="x"', b"\r\n--BB")),
    "too many": form(*[part('name="x"', b"")] * MAX_PARTS, MODEL),
}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_a_form_that_readers_read_differently_is_not_plain(body: bytes) -> None:
    made = form_model(body, TYPE)
    assert made
    while made.step():
        pass
    assert not (made.plain and body.count(b"--B") == made.delimiters)


@pytest.mark.parametrize(
    "parts",
    [[FILE, MODEL], [MODEL], [part('name="x"; filename="a"; filename*=utf-8\'\'a', b""), MODEL, part('name="models"', b"x")]],
)
def test_forms_of_usual_clients_are_plain(parts: list[bytes]) -> None:
    made = form_model(form(*parts), TYPE)
    assert made
    while made.step():
        pass
    assert made.plain
    assert (made.name, made.delimiters) == ("whisper-1", len(parts) + 1)


@pytest.mark.parametrize(
    ("content_type", "usual"),
    [
        ("application/json", True),
        ("", True),
        (TYPE, True),
        ('multipart/form-data; boundary="B"', True),
        ("multipart/form-data; charset=utf-16; boundary=B", False),
        ("multipart/form-data; boundary=B; boundary=C", False),
        ("multipart/mixed; boundary=B", False),
        ("application/x-www-form-urlencoded", False),
    ],
)
def test_types_of_forms_that_readers_read_differently(content_type: str, usual: bool) -> None:
    assert is_usual(content_type) == usual


def test_the_last_field_counts_as_in_engines() -> None:
    assert found(form(part('name="model"', b"a"), MODEL)) == "whisper-1"


def test_what_begins_like_a_delimiter_is_content() -> None:
    """Of the boundary, or of another one that goes on; a flood of them is bounded like parts."""
    file = part('name="file"; filename="a"', b"RIFF\r\n--BB\r\n\r\n--B \tx" * 20)
    assert found(form(file, MODEL)) == found(form(MODEL, file)) == "whisper-1"
    assert found(form(part('name="file"; filename="a"', b"\r\n--BB" * MAX_PARTS), MODEL)) == ""
    assert found(form(part('name="model"', b"a\r\n--Bx"), MODEL)) == "whisper-1"


@pytest.mark.parametrize("value", [b"\xff\xfe", b"x" * (MAX_MODEL_CHARS + 1), b"x" * 5000, b""])
def test_what_is_no_name(value: bytes) -> None:
    assert found(form(part('name="model"', value))) == ""
    assert found(form(MODEL, part('name="model"', value))) == "whisper-1"


def test_parts_and_heads_are_bounded() -> None:
    """What is too much for us is passed on without a model."""
    other = part('name="x"', b"")
    assert found(form(*[other] * (MAX_PARTS - 1), MODEL)) == "whisper-1"
    assert found(form(*[other] * MAX_PARTS, MODEL)) == ""
    padded = part('name="x"', b"", "X-Padding: " + "x" * MAX_HEAD)
    assert found(form(padded, MODEL)) == ""


def test_each_step_searches_so_much_and_no_more() -> None:
    body = form(FILE * 20, MODEL)
    made, steps = FormModel(body, b"B", 1000), 1
    while made.step():
        steps += 1
    assert made.name == "whisper-1"
    assert len(body) // 1000 <= steps <= len(body) // 1000 + 10


queries = st.lists(
    st.tuples(
        st.sampled_from(["model", "mod%65l", "m%6Fdel", "x", "model+", ""]), st.sampled_from(["a", "a%20b", "a+b", "%C3%A9"])
    ),
    max_size=4,
)


@given(queries)
def test_the_query_s_last_one_counts(pairs: list[tuple[str, str]]) -> None:
    target = "/v1/files?" + "&".join(f"{key}={value}" for key, value in pairs)
    assert query_models(target) == (parse_qs(urlsplit(target).query).get("model") or [])


@pytest.mark.parametrize(
    "target", ["/v1/model=a", "/v1/x?", "/v1/x?model", "/v1/x?model=", "/v1/x?&&=&model=" + "x" * 300, "/v1/x?models=a"]
)
def test_a_query_without_a_model(target: str) -> None:
    assert query_models(target) == []
