"""What a W&B run is filed under: user before environment before defaults, and what W&B would refuse."""

import pytest
import wandb

from jgesr_lightning.build import wandb_labels
from jgesr_lightning.config import ConfigError, load_config
from jgesr_lightning.wandb_names import Labels, labels, refusal

DEFAULTS = {"name": "tiny", "group": "all seeds"}
VARIABLES = {
    "WANDB_NAME": "n", "WANDB_PROJECT": "p", "WANDB_RUN_GROUP": "g", "WANDB_ENTITY": "e", "WANDB_JOB_TYPE": "j",
    "WANDB_NOTES": "why", "WANDB_TAGS": "a, b,,",
}  # fmt: skip


def test_defaults_alone():
    assert labels({}, (), DEFAULTS, {}) == Labels("tiny", "jgesr_lightning", "all seeds")
    assert labels({}, (), DEFAULTS, dict.fromkeys(VARIABLES, "")) == labels({}, (), DEFAULTS, {})


def test_the_environment_rules_over_defaults():
    assert labels({}, (), DEFAULTS, VARIABLES) == Labels("n", "p", "g", "e", "j", "why", ("a", "b"))


def test_and_yields_to_what_the_user_set():
    given = {"name": "N", "project": "P", "group": "G", "entity": "E", "job_type": "J", "notes": "W"}
    assert labels(given, ["T"], DEFAULTS, VARIABLES) == Labels("N", "P", "G", "E", "J", "W", ("T",))
    assert labels({"project": "jgesr_lightning"}, (), DEFAULTS, VARIABLES).project == "jgesr_lightning"


@pytest.mark.parametrize("project", ["a/b", "a\\b", "a#b", "a?", "50%", "a:b", "x" * 129])
def test_projects_that_wandb_refuses_are_refused(project):
    with pytest.raises(wandb.errors.UsageError):  # by its own check
        wandb.Settings(project=project)
    assert refusal("project", project)
    with pytest.raises(ValueError, match="WANDB_PROJECT is"):
        labels({}, (), DEFAULTS, {"WANDB_PROJECT": project})
    with pytest.raises(ConfigError, match=r"^logging\.project is"):
        load_config(None, [f"logging.project={project}"])


@pytest.mark.parametrize("tag", ["", "x" * 65])
def test_tags_that_wandb_refuses_are_refused(tag):
    with pytest.raises(ValueError, match="1 and 64"):
        wandb.Settings(run_tags=("good", tag))
    assert refusal("tag", tag)
    with pytest.raises(ConfigError, match=r"^logging\.tags is .*; each must"):
        load_config(None, [f"logging.tags=[good,'{tag}']"])
    assert not refusal("tag", "x" * 64)
    wandb.Settings(run_tags=("x" * 64,))


@pytest.mark.parametrize("key", ["name", "group", "job_type", "entity"])
def test_other_names_have_a_length(key):
    assert not refusal(key, "x" * 128)
    for wrong in ("x" * 129, "", "  "):
        assert refusal(key, wrong)
    assert not refusal(key, None)
    assert not refusal("notes", "several\nlines" * 100)


def test_a_message_stays_one_short_line():
    with pytest.raises(ValueError) as caught:
        labels({}, (), DEFAULTS, {"WANDB_RUN_GROUP": "x" * 5000})
    assert len(str(caught.value)) < 150 and "has 5000" in str(caught.value)


def test_a_run_that_was_given_a_name_keeps_it_and_one_named_after_its_file_does_not(monkeypatch, tmp_path):
    for variable, value in VARIABLES.items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "mine.yaml").write_text("base: []\nlogging: {tags: [own]}\n")
    config = load_config(tmp_path / "mine.yaml")
    found = wandb_labels(config, config.folder)
    assert (config.name, found.name, found.project, found.tags) == ("mine", "n", "p", ("own",))
    config = load_config(tmp_path / "mine.yaml", ["name=given", "logging.project=set"])
    found = wandb_labels(config, config.folder)
    assert (found.name, found.project, found.group) == ("given", "set", "g")
    monkeypatch.setenv("WANDB_PROJECT", "a/b")
    with pytest.raises(ConfigError, match="WANDB_PROJECT is 'a/b'"):
        wandb_labels(load_config(tmp_path / "mine.yaml"), tmp_path)
    wandb_labels(load_config(tmp_path / "mine.yaml", ["logging.wandb=false"]), tmp_path)  # nobody asks W&B
