"""Settings: what is accepted, who wins, and where a value was set."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from localllm.config import OTHER_VARIABLES, Origin, format_figure, load_settings, user_directories
from localllm.engine.request import SamplingParams
from localllm.errors import SettingsError, UsageError
from localllm.settings import SETTINGS, Accepts, Settings, number_of, parse_bytes
from localllm.toml_file import TomlFile

REPOSITORY = Path(__file__).parent.parent
VALUES = {
    "text": "words",
    "texts": ["a"],
    "table": {"chat.stop": "ctrl+x"},
    "switch": True,
    "integer": 7,
    "number": 0.5,
    "bytes": "1.5GiB",
    "bytes or off": "1.5GiB",
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refused(config_file, flags=None, environ=None, match=None) -> SettingsError:
    with pytest.raises(SettingsError, match=match) as caught:
        load_settings(flags, environ=environ or {}, config_file=config_file)
    return caught.value


def test_without_a_file_or_a_variable_everything_is_default(config_file):
    resolved = load_settings(environ={}, config_file=config_file)
    assert resolved.settings == Settings()
    assert {origin.kind for origin in resolved.origins.values()} == {"default"}


def test_a_flag_beats_the_environment_which_beats_the_file(config_file):
    write(config_file, "seed = 1\ntop_k = 1\nctx = 1\n")
    environ = {"LOCALLLM_SEED": "2", "LOCALLLM_TOP_K": "2"}
    resolved = load_settings({"seed": 3, "top_k": None}, environ=environ, config_file=config_file)
    assert (resolved.settings.seed, resolved.settings.top_k, resolved.settings.ctx) == (3, 2, 1)
    assert resolved.origins["seed"] == Origin("flag", "--seed")
    assert resolved.origins["top_k"] == Origin("environment", "LOCALLLM_TOP_K")
    assert resolved.origins["ctx"] == Origin("file", f"{config_file}:3")
    assert resolved.origins["model"].where == "default"


def test_every_field_of_the_settings_is_accepted_and_reported():
    names = {field.name for field in dataclasses.fields(Settings)}
    assert names == set(SETTINGS) == set(load_settings(environ={}, config_file=Path("/nowhere")).origins)


def test_a_figure_has_three_digits_and_no_power_of_ten():
    figures = {1174.6: "1170", 999.6: "1000", 1e7: "10000000", 12.34: "12.3", 20.0: "20", 0.8764: "0.876", 0: "0"}
    figures[0.00001234] = "0.0000123"
    assert {value: format_figure(value) for value in figures} == figures


def example(name: str) -> object:
    accepts = SETTINGS[name].accepts
    if accepts.numbered:
        return accepts.usual
    return accepts.choices[1] if accepts.choices else VALUES[accepts.kind]


def meant(name: str, value: object) -> object:
    if SETTINGS[name].accepts.kind in ("bytes", "bytes or off"):
        return 3 << 29
    return tuple(value) if isinstance(value, list) else value


AMOUNTS = {"8GiB": 8 << 30, "8G": 8 << 30, "8g": 8 << 30, "8GB": 8 * 10**9, "0.5 gib": 1 << 29, "600MiB": 600 << 20}


@pytest.mark.parametrize("amount", AMOUNTS)
def test_an_amount_of_memory_has_a_number_and_a_unit(config_file, amount):
    assert load_settings({"ram": amount}, environ={}, config_file=config_file).settings.ram == AMOUNTS[amount]


@pytest.mark.parametrize(
    "amount", ["8", "0", "0GiB", "-1GiB", "8 gigs", "GiB", "", "50%", "1e3GiB", "1e3G", "nanG", "8QiB", "٨GiB", "99"]
)
def test_what_is_no_amount_of_memory_is_refused_with_one_that_is(config_file, amount):
    error = refused(config_file, {"vram": amount})
    flag, proposed = error.fix.split()
    total = psutil.virtual_memory().total
    assert flag == "--vram" and 0 < (parse_bytes(proposed) or 0) <= total and "8GiB" in error.why
    if total > 8 << 30 and amount in ("8", "8 gigs"):
        assert proposed == "8GiB"


@pytest.mark.parametrize("text", ["0", '"0"', '"off"'])
def test_what_is_kept_on_the_disk_can_be_switched_off(config_file, text):
    write(config_file, f"cache_disk = {text}\n")
    assert load_settings(environ={}, config_file=config_file).settings.cache_disk == 0
    variable = {"LOCALLLM_CACHE_DISK": text.strip('"')}
    assert load_settings(environ=variable, config_file=config_file).settings.cache_disk == 0


@pytest.mark.parametrize(
    ("typed", "proposed"),
    [("20", "20GiB"), ("0GiB", "off"), ("on", "8GiB"), ("-1GiB", "8GiB"), ("false", "off"), ("OFF", "off")],
)
def test_what_is_no_room_on_the_disk_is_refused_with_one_that_is(config_file, typed, proposed):
    error = refused(config_file, {"cache_disk": typed}, match="--cache-disk")
    assert error.fix == f"--cache-disk {proposed}" and "or off" in error.why


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_set_in_the_file(config_file, name):
    value = example(name)
    text = str(value).lower() if isinstance(value, bool) else repr(value).replace("': ", "' = ")
    write(config_file, f"# first\n\n{name} = {text}\n")
    resolved = load_settings(environ={}, config_file=config_file)
    assert getattr(resolved.settings, name) == meant(name, value)
    assert resolved.origins[name].where == f"{config_file}:3"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_set_by_a_variable(config_file, name):
    value = example(name)
    text = value[0] if isinstance(value, list) else str(value)
    if isinstance(value, dict):
        text = ";".join(f"{key}={item}" for key, item in value.items())
    variable = f"LOCALLLM_{name.upper()}"
    resolved = load_settings(environ={variable: text}, config_file=config_file)
    assert getattr(resolved.settings, name) == meant(name, value)
    assert resolved.origins[name].where == variable


RANGED = [name for name, row in SETTINGS.items() if row.accepts.kind in ("integer", "number")]


@pytest.mark.parametrize("name", sorted({*RANGED} & {field.name for field in dataclasses.fields(SamplingParams)}))
def test_a_range_is_the_one_of_the_sampling_parameters(name):
    accepts = SETTINGS[name].accepts
    for value in (accepts.low, accepts.high):
        SamplingParams(**{name: value})
    for value in (accepts.low - 1, accepts.high * 2 + 1):
        with pytest.raises(UsageError):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("key", "nearest"), [("temprature", "temperature"), ("topk", "top_k"), ("max-tokens", "max_tokens"), ("q", "seed")]
)
def test_an_unknown_key_names_file_line_and_the_nearest_key(config_file, key, nearest):
    write(config_file, f"seed = 1\nstop = [\n  'a',\n]\n{key} = 1\n")
    error = refused(config_file)
    assert error.exit_code == 2 and f"{config_file}:5" in error.what and key in error.what
    assert key == "q" or f"the nearest is {nearest!r}" in error.why


@pytest.mark.parametrize("text", ["compress = 0.5", "[run]\nseed = 1", ""])
def test_no_key_is_named_as_the_nearest_of_one_that_is_like_none(config_file, text):
    write(config_file, text)
    error = refused(config_file, environ={} if text else {"LOCALLLM_COMPRESS": "1"}, match="unknown key")
    assert error.why.startswith("known are ") and error.fix in ("delete the line", "unset LOCALLLM_COMPRESS")


def test_an_unknown_table_names_its_line(config_file):
    write(config_file, "seed = 1\n\n[sampling]\ntemperature = 1\n")
    refused(config_file, match=r"'sampling'.*config\.toml:3")


@pytest.mark.parametrize("variable", ["LOCALLLM_TEMPRATURE", "LOCALLLM_temperature", "LOCALLLM_TEMPERATURES"])
def test_an_unknown_variable_names_the_nearest(config_file, variable):
    error = refused(config_file, environ={variable: "1"}, match=variable)
    assert "LOCALLLM_TEMPERATURE'" in error.why and error.fix == f"unset {variable}"


def test_variables_that_are_no_settings_are_let_through(config_file):
    assert load_settings(environ=dict.fromkeys(OTHER_VARIABLES, "x"), config_file=config_file).settings == Settings()


def test_an_empty_variable_is_not_set(config_file):
    assert load_settings(environ={"LOCALLLM_SEED": ""}, config_file=config_file).settings.seed is None


WRONG = {
    "temperature": ["'hot'", "true", "-0.1", "nan", "inf", "101"],
    "top_p": ["1.5"],
    "top_k": ["1.5", "-1"],
    "max_tokens": ["0"],
    "seed": ["-1", "9223372036854775808"],
    "device": ["'gpu'"],
    "dtype": ["16"],
    "offline": ["'yes'", "1"],
    "stop": ["'a'", "['']", "[1]"],
    "model": ["''", "['tiny']"],
    "threads": ["0"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_wrong_value_names_key_value_line_and_what_is_accepted(config_file, key, value):
    error = refused(write(config_file, f"# one\n{key} = {value}\n"))
    assert error.what.casefold().startswith(f"{key} is {value[:20]}")
    assert f"{config_file}:2" in error.what and "must be" in error.why and error.fix


@pytest.mark.parametrize(
    "setting", ["SEED=x", "SEED=1.5", "TEMPERATURE=warm", "TEMPERATURE=nan", "OFFLINE=maybe", "CTX=-1"]
)
def test_a_wrong_variable_names_itself_and_what_is_accepted(config_file, setting):
    variable, _, text = f"LOCALLLM_{setting}".partition("=")
    error = refused(config_file, environ={variable: text}, match=variable)
    assert text in error.what and error.fix == f"unset {variable}"


MEANT = {
    "INT4": "int4",
    "bf61": "bf16",
    "q4_k_m": "int4",
    "Q8_0": "int8",
    "8bit": "int8",
    "fp16": "bf16",
    "gguf": "auto",
}


@pytest.mark.parametrize(("typed", "meant"), MEANT.items())
def test_a_format_that_is_none_here_is_told_what_was_meant(config_file, typed, meant):
    assert refused(config_file, {"weights": typed}).fix == f"--weights {meant}"


NUMBERED = Accepts("text", high=1024, choices=("off",), usual="sinks:64", numbered={"sinks": 16, "heavy": 32})


@pytest.mark.parametrize(
    ("text", "number"), [("off", None), ("sinks:16", None), ("heavy:32", 32), ("heavy:1024", 1024)]
)
def test_a_name_may_have_a_number_behind_it(text, number):
    assert NUMBERED.allows(text) and number_of(text, "heavy") == number


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("sinks:15", "sinks:16"),
        ("heavy:1025", "heavy:1024"),
        ("heavi:40", "heavy:40"),
        ("heavy:1e1", "heavy:32"),
        ("heavy:31", "heavy:32"),
        ("heavy", "heavy:64"),
        ("none", "off"),
        ("sinks=32", "sinks:32"),
        ("sinks:032", "sinks:32"),
        ("sinks:+32", "sinks:64"),
        ("heavy:", "heavy:64"),
        ("20", "sinks:20"),
        ("", "sinks:64"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_the_nearest(text, meant):
    assert not NUMBERED.allows(text) and NUMBERED.likeliest(text) == meant
    described = "off, sinks:N or heavy:N, where N is a whole number from 16 (sinks) or 32 (heavy) to 1024"
    assert NUMBERED.describe() == described


@pytest.mark.parametrize(
    ("text", "meant"), [("30%", "0.3"), ("70", "0.7"), ("0.2", "0.2"), ("101", "0.99"), ("1.1", "0.99")]
)
def test_a_share_in_percent_is_understood(text, meant):
    assert Accepts("number", 0.01, 0.99, usual="0.5").likeliest(text) == meant


def test_a_wrong_flag_names_itself(config_file):
    assert refused(config_file, {"max_tokens": 0}, match="--max-tokens is 0").exit_code == 2


@pytest.mark.parametrize("text", ["offline = true", "offline = false"])
@pytest.mark.parametrize(("word", "value"), [("1", True), ("Yes", True), ("ON", True), ("0", False), ("off", False)])
def test_a_switch_understands_the_usual_words(config_file, text, word, value):
    write(config_file, text)
    assert load_settings(environ={"LOCALLLM_OFFLINE": word}, config_file=config_file).settings.offline is value


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed = 1\nseed == 2\n", "line 2"),
        (b"seed = 1\nseed = 2\n", "line 2"),
        (b"seed = 1\nmodel = '\xff'\n", ":2 is not UTF-8"),
        (b"a = " + b"[" * 100_000, "config.toml"),
        (b"#" * 2_000_000, "too large"),
    ],
    ids=["syntax", "twice", "encoding", "deep", "large"],
)
def test_a_broken_file_is_one_clear_error(config_file, content, expected):
    config_file.write_bytes(content)
    error = refused(config_file)
    assert expected in error.what + error.why


def test_a_folder_in_the_place_of_the_file_is_one_clear_error(config_file):
    config_file.mkdir()
    refused(config_file, match="cannot be read")


def test_a_value_over_several_lines_is_named_by_its_first(config_file):
    file = TomlFile.read(write(config_file, "seed = 1\nstop = [\n  'a',\n  'b',\n]\n"))
    assert file.where("stop") == f"{config_file}:2"


def test_the_line_is_the_keys_own_and_not_one_that_mentions_it(config_file):
    file = TomlFile.read(write(config_file, "# seed\nmodel = 'seed'\n[a]\nseed = 1\n[b]\nseed = 2\n"))
    assert (file.where("a", "seed"), file.where("b", "seed")) == (f"{config_file}:4", f"{config_file}:6")


def test_one_variable_moves_all_user_files(tmp_path):
    directories = user_directories({"LOCALLLM_HOME": str(tmp_path)})
    assert dataclasses.astuple(directories) == (tmp_path / "config", tmp_path / "data", tmp_path / "cache")


@pytest.mark.skipif(sys.platform != "linux", reason="XDG is for Linux")
def test_the_folders_of_the_desktop_standard_are_honoured(tmp_path, monkeypatch):
    kinds = ("config", "data", "cache")
    for kind in kinds:
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path / kind))
    assert dataclasses.astuple(user_directories({})) == tuple(tmp_path / kind / "localllm" for kind in kinds)


def test_the_users_file_is_found_below_the_home_variable(tmp_path):
    (tmp_path / "config").mkdir()
    write(tmp_path / "config" / "config.toml", "seed = 5\n")
    assert load_settings(environ={"LOCALLLM_HOME": str(tmp_path)}).settings.seed == 5


def test_importing_the_settings_loads_no_heavy_library():
    code = "import localllm.registry, sys; print({'torch', 'huggingface_hub', 'platformdirs'} & {*sys.modules})"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"set()\n"


def test_a_row_of_the_table_is_a_key_a_variable_and_a_flag(config_file, tmp_path):
    """A setting is written down once: a copy of the package in which one is added knows it everywhere."""
    package = tmp_path / "copy" / "localllm"
    shutil.copytree(REPOSITORY / "localllm", package, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    table = package / "settings.py"
    row = '    warmth: int | None = setting(None, Accepts("integer", 0, 9), "run plan /set", "N", "How warm it is.")\n'
    marker = "    model: str = setting("
    table.write_text(table.read_text("utf-8").replace(marker, row + marker), "utf-8")
    code = (
        "from localllm.chat.dialogue import SETTABLE; from localllm.cli.app import load_command;"
        "from localllm.config import load_settings;"
        "print('warmth' in SETTABLE, *('--warmth' in str([p.opts for p in load_command(name).params])"
        " for name in ('run', 'plan', 'serve')),"
        "load_settings().settings.warmth, load_settings({'warmth': 4}).origins['warmth'].where)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package.parent), "LOCALLLM_HOME": str(tmp_path), "LOCALLLM_WARMTH": "3"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert child.stdout.split() == ["True", "True", "True", "False", "3", "--warmth"]
