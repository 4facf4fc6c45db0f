"""Configuration: forms of values, precedence of sources, and errors an operator can act on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.config import ADDRESS, COUNT, DURATION, SIZE, URL, Config, describe, load, unknown_variables
from millstream.errors import ConfigurationError

UNITS = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


def refusal(*assignments: str, file: Path | None = None, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(file, environment or {}, assignments)
    return f"{caught.value.message} | {caught.value.hint or ''}"


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str, space: str) -> None:
    assert SIZE.parse(f"{number}{space if unit else ''}{unit}") == number * UNITS[unit]


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(SECONDS)))
def test_a_duration_is_its_number_times_its_unit(whole: int, thousandths: int, unit: str) -> None:
    assert math.isclose(DURATION.parse(f"{whole}{unit}"), whole * SECONDS[unit])
    value = DURATION.parse(f"{whole}.{thousandths:03d} {unit}")
    assert math.isclose(value, (whole + thousandths / 1000) * SECONDS[unit], abs_tol=1e-9)


@pytest.mark.parametrize("value", ["", "8MB", "8 mib", "-1", "1.5MiB", "MiB", "8MiBs", "٨MiB", True, 1.0, []])
def test_what_is_no_size_is_refused_with_key_value_and_example(value: object) -> None:
    with pytest.raises(ValueError):
        SIZE.parse(value)
    message = refusal(f"http.body_bytes_max={value}")
    assert "http.body_bytes_max" in message
    assert "8MiB" in message


@pytest.mark.parametrize(
    "value", ["", "30", "30 sec", "-1s", "1e3s", "s", ".5s", "1.s", "1h30m", "inf", "nans", 30, True]
)
def test_what_is_no_duration_is_refused_with_key_value_and_example(value: object) -> None:
    with pytest.raises(ValueError):
        DURATION.parse(value)
    message = refusal(f"read.long_poll_timeout={value}")
    assert f"read.long_poll_timeout = {str(value).strip()!r}" in message
    assert "500ms or 30s" in message


@pytest.mark.parametrize("value", ["", "-1", "1.0", "ten", "1e3", "٣", True])
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        COUNT.parse(value)
    assert "a whole number" in refusal(f"http.connections_max={value}")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("127.0.0.1:4437", ("127.0.0.1", 4437)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("::1", 80)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
    ],
)
def test_an_address_is_a_host_and_a_port(value: str, expected: tuple[str, int]) -> None:
    assert ADDRESS.parse(value) == expected


@pytest.mark.parametrize(
    "value", ["", "4437", ":4437", "localhost", "localhost:", "a:65536", "::1:80", "a b:1", "a:-1"]
)
def test_what_is_no_address_is_refused_with_key_value_and_example(value: str) -> None:
    message = refusal(f"server.listen={value}")
    assert f"server.listen = {value!r}" in message
    assert "127.0.0.1:4437" in message


@pytest.mark.parametrize(
    "value", ["example.com", "ftp://x", "https://x/path", "https://x?q", "https://", "https://a b"]
)
def test_what_is_no_base_url_is_refused(value: str) -> None:
    assert "https://streams.example.com" in refusal(f"server.public_url={value}")


def test_an_empty_base_url_means_none() -> None:
    assert URL.parse("") is None
    assert load(None, {}, ["server.public_url=https://x.example:8443"]).server.public_url == "https://x.example:8443"


def test_nothing_given_is_the_defaults() -> None:
    assert load(None, {}, []) == Config()


def test_every_documented_default_is_what_its_setting_has() -> None:
    config = Config()
    for key, default, kind, doc in describe():
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == kind.parse(default)
        assert doc.endswith(".")
        assert kind.expects


def test_flags_beat_the_environment_and_the_environment_the_file(tmp_path: Path) -> None:
    file = tmp_path / "millstream.toml"
    file.write_text('version = 1\n[http]\nbody_bytes_max = "1MiB"\nconnections_max = 1\npipelined_requests_max = 1\n')
    environment = {"MILLSTREAM_HTTP_CONNECTIONS_MAX": "2", "MILLSTREAM_HTTP_PIPELINED_REQUESTS_MAX": "2"}
    config = load(file, environment, ["http.pipelined_requests_max=3"])
    assert config.http.body_bytes_max == 1024**2
    assert config.http.connections_max == 2
    assert config.http.pipelined_requests_max == 3
    assert config.http.header_bytes_max == Config().http.header_bytes_max


def test_the_last_of_two_flags_wins() -> None:
    assert load(None, {}, ["http.connections_max=1", " http.connections_max = 2 "]).http.connections_max == 2


def test_a_value_that_starts_with_a_dollar_names_an_environment_variable() -> None:
    assert load(None, {"SIZE": "3MiB"}, ["http.body_bytes_max=$SIZE"]).http.body_bytes_max == 3 * 1024**2
    message = refusal("http.body_bytes_max=$MISSING")
    assert "http.body_bytes_max" in message
    assert "'MISSING'" in message
    assert "not set" in message


def test_a_malformed_value_behind_a_variable_is_refused_with_the_value() -> None:
    assert "http.body_bytes_max = 'plenty' is not a size" in refusal(
        "http.body_bytes_max=$SIZE", environment={"SIZE": "plenty"}
    )


def test_environment_variables_of_other_programs_are_left_alone() -> None:
    assert load(None, {"PATH": "/bin", "MILLSTREAM": "x", "HTTP_BODY_BYTES_MAX": "x"}, []) == Config()


def test_an_unknown_setting_is_refused_with_the_ones_there_are() -> None:
    message = refusal("http.body_bytes=1")
    assert "'http.body_bytes'" in message
    assert "body_bytes_max" in message
    assert "the command line" in message


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MILLSTREAM_SERVER_PORT", "tcp://10.96.0.12:4437", "Kubernetes sets it for a Service of that name"),
        ("MILLSTREAM_SERVER_SERVICE_HOST", "10.96.0.12", "Kubernetes sets it for a Service of that name"),
        ("MILLSTREAM_CLUSTER_DIR", "/tmp/cluster", "there is no such setting"),
        ("MILLSTREAM_HTTP_BODY_BYTES", "1MiB", "did you mean 'MILLSTREAM_HTTP_BODY_BYTES_MAX'?"),
        ("MILLSTREAM_SERVR_LISTEN", "0.0.0.0:1", "did you mean 'MILLSTREAM_SERVER_LISTEN'?"),
    ],
)
def test_a_variable_that_only_looks_like_a_setting_is_named_and_changes_nothing(
    variable: str, value: str, said: str
) -> None:
    assert load(None, {variable: value}, []) == Config()
    (sentence,) = unknown_variables({variable: value, "MILLSTREAM_SERVER_LISTEN": "127.0.0.1:1"})
    assert f"the environment variable {variable} is ignored" in sentence
    assert said in sentence


def test_variables_of_commands_and_of_operators_are_not_told_of() -> None:
    assert (
        unknown_variables({"MILLSTREAM_URL": "x", "MILLSTREAM_TOKEN": "x", "MILLSTREAM_SECRET": "x", "PATH": "x"}) == []
    )


@pytest.mark.parametrize(
    ("assignment", "pointer"),
    [
        ("server.hot_payload_backend=rocksdb", "[hot] and [log]"),
        ("server.write_only_leader=false", "cluster.forward"),
        ("cluster.routes=http://10.0.0.2:4437", "cluster.listen"),
    ],
)
def test_a_setting_of_another_server_is_refused_with_what_does_the_same(assignment: str, pointer: str) -> None:
    assert pointer in refusal(assignment)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("http.body_byte_max", "http.body_bytes_max"), ("htpp.body_bytes_max", "http.body_bytes_max")],
)
def test_a_misspelt_setting_is_refused_with_what_was_meant(written: str, meant: str) -> None:
    assert f"did you mean {meant!r}?" in refusal(f"{written}=1")


@pytest.mark.parametrize("key", ["htpp.body_bytes_max", "", "body_bytes_max"])
def test_an_unknown_section_is_refused_with_the_ones_there_are(key: str) -> None:
    message = refusal(f"{key}=1")
    assert "there is no section" in message
    assert "server, log" in message


def test_a_flag_without_a_value_is_refused_with_the_form() -> None:
    message = refusal("http.body_bytes_max")
    assert "'http.body_bytes_max' has no value" in message
    assert "section.key=value" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "write version = 1"),
        ("version = 2", "version is 2; write version = 1"),
        ('version = "1"', "version is '1'"),
        ("version = 1\nlisten = 3", "'listen' stands outside a section"),
        ("version = 1\n[serve]\nlisten = 3", "there is no section 'serve'"),
        ("version = 1\n[server]\nport = 3", "there is no setting 'server.port'"),
        ("version = 1\n[server]\nlisten = 3", "server.listen = 3 is not HOST:PORT"),
        ("version = 1\n[server]\ndata_dir = 3", "server.data_dir = 3 is not a path"),
        ("version = 1\n[log]\nsegment_bytes = true", "log.segment_bytes = True is not a size"),
        ("version = 1\n[read]\nlong_poll_timeout = 10", "read.long_poll_timeout = 10 is not a duration"),
        ("version = 1\n[log.segment_bytes]\nx = 1", "log.segment_bytes = {'x': 1} is not a size"),
        ("version = [", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_what_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "millstream.toml"
    file.write_text(content)
    message = refusal(file=file)
    assert str(file) in message
    assert said in message


def test_a_file_that_is_missing_or_no_text_is_refused_with_its_path(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none.toml'} cannot be read: No such file" in refusal(file=tmp_path / "none.toml")
    assert "cannot be read" in refusal(file=tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in refusal(file=binary)


def test_a_home_directory_in_a_path_is_expanded() -> None:
    assert load(None, {}, ["server.data_dir=~/streams"]).server.data_dir == Path.home() / "streams"
