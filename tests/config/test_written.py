"""One reader for every YAML file: values as written, typed by a model, mistakes named with file and line."""

from typing import Any, Literal

import pytest
import yaml
from pydantic import Field

from jgesr_lightning.config import ConfigError, Section, Settings, as_argument, load_config, read_yaml, written
from jgesr_lightning.config.written import argument


class Inner(Section):
    kind: Literal["slow", "fast"] = "slow"
    weight: float = Field(1.0, gt=0, le=2)


class Outer(Section):
    seeds: list[int] = Field(default_factory=lambda: [0])
    noise: list[float] = Field(default_factory=list)
    rounds: int | None = None
    project: str = "none"
    on: bool = False
    settings: Settings = Field(default_factory=dict)
    methods: list[str] | dict[str, Settings] = Field(default_factory=dict)
    inner: Inner = Inner()
    anything: Any = None


@pytest.fixture
def read(tmp_path):
    def read_text(text, encoding="utf-8"):
        (tmp_path / "file.yaml").write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
        return read_yaml(tmp_path / "file.yaml", Outer)

    return read_text


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("seeds: [010, 1_000]", "seeds", [10, 1000]),  # YAML 1.1 says 8
        ("noise: [1e-3, 1]", "noise", [0.001, 1.0]),
        ("project: no", "project", "no"),
        ("project: 77950e8", "project", "77950e8"),
        ("project: 2020-01-01", "project", "2020-01-01"),
        ("on: yes", "on", True),
        ("rounds: ~", "rounds", None),
        ("inner: {kind: fast}", "inner", Inner(kind="fast")),
        ("methods: [a, on]", "methods", ["a", "on"]),
        ("anything: 0x1F", "anything", "0x1F"),
        ("anything: [1, 1.5, true, x]", "anything", (1, 1.5, True, "x")),
        ("", "seeds", [0]),
        ("methods:", "methods", {}),
    ],
)
def test_values_are_read_as_the_type_of_their_field(read, text, key, value):
    found = getattr(read(text).values, key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "about"),
    [
        ("seeds: [0]\nrounds: 1:30\n", 2, "rounds is '1:30'; it must be a whole number or null"),  # YAML 1.1 says 90
        ("noise:\n- 0.1\n- yes\n", 3, "noise[1] is 'yes'; it must be a number"),
        ("\nsettings: [a]\n", 2, "settings is a list; it must be key: value pairs"),
        ("\nseeds: {a: 1}\n", 2, "seeds holds keys of its own; it must be a list"),
        ("\nseeds: 3\n", 2, "seeds is '3'; it must be a list"),
        ("\nmethods: jgesr\n", 2, "methods is 'jgesr'; it must be a list such as [a,b] or key: value pairs"),
        ("\nmethods: {a: [1]}\n", 2, "methods.a is a list; it must be key: value pairs"),
        ("\nseds: [1]\n", 2, "unknown key seds (did you mean 'seeds'?); known: seeds, noise"),
        ("inner:\n  wieght: 1\n", 2, "unknown key inner.wieght (did you mean 'weight'?)"),
        ("inner:\n  weight: 3\n", 2, "inner.weight is 3.0; it must be a number, at most 2"),
        ("inner:\n  kind: fst\n", 2, "inner.kind is 'fst' (did you mean 'fast'?); it must be one of: slow, fast"),
        ("\ninner: [a]\n", 2, "inner is a list; it must be key: value pairs"),
        ("seeds: [1]\nseeds: [2]\n", 2, "seeds stands twice (first in line 1)"),
        ("settings:\n  a: {b: 1}\n  a.b: 2\n", 3, "a.b stands twice (first in line 2)"),
        ("settings:\n  a: [[1]]\n", 2, "settings.a must be a number, a word or a list"),
        ("- a\n", 1, "must hold key: value pairs"),
        ("\nproject: 'a\n", 3, "not valid YAML"),
        ("project: *nowhere\n", 1, "undefined alias"),
        ("inner: {<<: 3}\n", 1, "<< takes *anchor"),
        ("rounds: ${seeds}\n", 1, "rounds is '${seeds}'; it must be a whole number or null"),
    ],
)
def test_mistakes_are_named_with_file_and_line(read, tmp_path, text, line, about):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert about in str(caught.value)
    assert f"{tmp_path / 'file.yaml'}, line {line}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "about"),
    [
        ("project: Zürich".encode("latin-1"), "not UTF-8 text (byte 10)"),
        ("project: x".encode("utf-16"), "not UTF-8 text (byte 0)"),
        (b"a: \x00", "special characters are not allowed"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ("anything: &a [*a]", "nested too deeply"),
        ("settings: {x: &a {y: *a}}", "nested too deeply"),
        ("inner: &a\n  <<: *a\n", "nested too deeply"),
    ],
)
def test_files_that_are_no_settings_are_one_line(read, content, about):
    with pytest.raises(ConfigError) as caught:
        read(content)
    assert about in str(caught.value)
    assert "file.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml", Outer)


def test_merge_keys_are_merged_as_yaml_does(read):
    text = """
    settings: {seed: 1, local: {lr: 2}}
    methods:
      base: &base {alpha: 1, beta: 2, local: {lr: 3}}
      more: &more {alpha: 7, gamma: 8}
      one: {<<: *base, beta: 5}
      two: {<<: [*more, *base]}
    """
    methods = read(text).values.methods
    one, two = ({key: as_argument(value) for key, value in methods[name].items()} for name in ("one", "two"))
    assert one == {"alpha": "1", "beta": "5", "local.lr": "3"}
    assert two == {"alpha": "7", "beta": "2", "gamma": "8", "local.lr": "3"}


def test_a_run_may_merge_too(tmp_path):
    (tmp_path / "run.yaml").write_text("local: &l {lr: 0.5, epochs: 2}\nseeds: {channel: 3}\nchannel: {noise: 0.3}\n")
    assert load_config(tmp_path / "run.yaml").local.lr == 0.5
    (tmp_path / "run.yaml").write_text("data: {<<: &d {kappa: 0.5}, fraction: 0.5}\n")
    assert load_config(tmp_path / "run.yaml").data.kappa == 0.5


def test_settings_keep_their_text_and_place_until_a_run_types_them(read, tmp_path):
    found = read(
        "settings:\n  local: {lr: 1e-1}\n  name: 010\n  logging.tags: [a, 1e5]\n  logging.notes: ''\n"
    ).values.settings
    assert {key: as_argument(value) for key, value in found.items()} == {
        "local.lr": "1e-1",
        "name": "010",
        "logging.tags": "[a,1e5]",
        "logging.notes": '""',
    }
    config = load_config(None, ["name=mine"], settings=found)
    assert (config.local.lr, config.name, config.logging.tags, config.logging.notes) == (0.1, "mine", ("a", "1e5"), "")
    wrong = read("settings:\n  local:\n    lr: -1\n").values.settings
    with pytest.raises(ConfigError, match=r"local.lr is -1.0; it must be a number, above 0 \(.*file.yaml, line 3\)"):
        load_config(None, (), settings=wrong)
    unknown = read("settings: {learning_rate: 1}\n").values.settings
    with pytest.raises(ConfigError, match=r"file.yaml, line 1: unknown key 'learning_rate' \(did you mean 'local.lr'"):
        load_config(None, (), settings=unknown)


TEXTS = ("''", '"null"', "'~'", '" none "', "' '", "'[a, b]'", "'\"\"'", "'\"'", "'\"a\"'", "a, b", "null", "~", "")


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_looks_like_something_else_is_the_same_as_an_argument(read, text):
    wanted = yaml.safe_load(f"- {text}")[0]  # nothing here that YAML 1.1 takes for a number
    written_so = read(f"settings: {{logging.notes: {text if ', ' not in text else repr(text.strip(chr(39)))}}}\n")
    setting = written_so.values.settings["logging.notes"]
    assert load_config(None, settings={"logging.notes": setting}).logging.notes == wanted
    assert load_config(None, [f"logging.notes={as_argument(setting)}"]).logging.notes == wanted


def test_texts_that_look_like_no_value_stay_texts_in_a_list(read):
    setting = read("settings: {logging.tags: ['null', '~', a, '[b]', null]}\n").values.settings["logging.tags"]
    assert as_argument(setting) == '["null","~",a,"[b]",null]'
    assert [item.is_null for item in argument(as_argument(setting))] == [False, False, False, False, True]


def test_places_of_every_value(read, tmp_path):
    places = read("seeds:\n- 1\n- 2\ninner:\n  weight: 2\n").places
    assert places["seeds[1]"] == f"{tmp_path / 'file.yaml'}, line 3"
    assert places["inner.weight"] == f"{tmp_path / 'file.yaml'}, line 5"


def test_a_setting_made_by_hand():
    made = {"rounds": written(3, "here"), "logging.tags": written(["a", 1e5]), "resume": written(None)}
    assert [as_argument(value) for value in made.values()] == ["3", "[a,100000.0]", "null"]
    config = load_config(None, settings=made)
    assert (config.rounds, config.logging.tags, config.resume) == (3, ("a", "100000.0"), None)


@pytest.mark.parametrize("tags", [["x, y", "z"], ["a: b"], ["] #", 'say "hi"'], ["größer\\"]])
def test_a_list_is_the_same_as_an_argument(tags):
    text = as_argument(written(tags))
    assert load_config(None, [f"logging.tags={text}"]).logging.tags == tuple(tags)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local.batch_size: ful", "is 'ful' (did you mean 'full'?); it must be a whole number or full"),
        ("local.batch_size: 0", "is 0; it must be a whole number, at least 1 or full"),
        ("data.planted: label", "is 'label' (did you mean 'labels'?); it must be one of: labels, rotations, null"),
        ("local.lr: 1e39", "is 1e+39; it must be a number, 0 or between 1.18e-38 and 3.4e+38, which 32 bits hold"),
        ("data.label: ' '", "is ' '; it must be text that is not blank"),
        ("resume: ''", "is ''; it must be text that is not blank or null"),
        ("logging.tags: [a, ' ']", "is ['a', ' ']; each must not be empty"),
        ("aggregator.alpha: {x: 1}", "holds keys of its own; it must be a number"),
    ],
)
def test_what_would_do_is_said(tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(f"seed: 1\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert str(caught.value) == f"{text.partition(':')[0]} {said} ({tmp_path / 'run.yaml'}, line 2)"


def test_a_setting_of_a_study_may_be_null(read):
    found = read("settings: {local.proximal_mu: null, resume: ~}").values.settings
    config = load_config(None, ["local.proximal_mu=0.5"])
    assert config.local.proximal_mu == 0.5
    assert load_config(None, settings=found).local.proximal_mu is None
    assert as_argument(found["local.proximal_mu"]) == "null"
