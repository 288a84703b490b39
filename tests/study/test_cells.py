"""A study's file and its cells."""

import os

import pytest

from jgesr_lightning.config import ConfigError, load_config, to_dict
from jgesr_lightning.study import choose, load_study, parse_part
from jgesr_lightning.study.cells import copied
from tests.study.studies import BASE, ROOT, TWO, cells_of, write_study


def test_a_study_is_the_product_of_its_axes_seeds_first(tmp_path):
    cells = cells_of(
        tmp_path,
        """
settings: {rounds: 3, local: {lr: 0.5}}
methods:
  fedavg:
  prox_strong: {name: fedprox, mu_prox: 1.0, local.momentum: 0.5}
data: {synthetic: {data.fraction: 0.5}}
noise: [0.1, 1]
missing_rate: [0.0, 0.05]
seeds: [0, 4]
""",
    )
    assert len(cells) == 16
    assert [cell.name for cell in cells[:3]] == [
        "synthetic_s0.1_m0.0_fedavg_seed0",
        "synthetic_s0.1_m0.0_prox_strong_seed0",
        "synthetic_s0.1_m0.05_fedavg_seed0",
    ]
    last = cells[-1]
    assert last.name == "synthetic_s1_m0.05_prox_strong_seed4"
    assert last.folder == tmp_path / "runs" / "tiny" / last.name
    config = last.config
    assert (config.aggregator.name, config.aggregator.settings) == ("fedprox", {"mu_prox": 1.0})
    assert (config.seed, config.channel.noise, config.channel.missing_rate) == (4, 1.0, 0.05)
    assert (config.rounds, config.local.lr, config.local.momentum, config.data.fraction) == (3, 0.5, 0.5, 0.5)
    assert cells[0].config.local.momentum == 0.0
    for cell in cells:  # what the command line makes of the arguments
        assert repr(load_config(cell.base, cell.overrides)) == repr(cell.config)


def test_the_base_is_a_path_from_the_studys_file(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    path = write_study(tmp_path, "methods: [local]\ndata: [synthetic]\n", BASE.replace("rounds: 2", "rounds: 7"))
    path.write_text(path.read_text().replace(f"{tmp_path}/", ""))
    monkeypatch.chdir(tmp_path / "here")
    (cell,) = load_study("../tiny.yaml")[1]
    assert cell.config.rounds == 7
    assert load_config(cell.base, cell.overrides) == cell.config
    (tmp_path / "base.yaml").rename(tmp_path / "here" / "base.yaml")  # from the current folder, where it is not there
    assert load_study("../tiny.yaml")[1][0].config.rounds == 7


def test_the_nearer_setting_wins(tmp_path):
    study = """
settings: {local.lr: 0.1, data.kappa: 0.1, rounds: 9}
methods: {fedavg: {local.lr: 0.2}}
data: {synthetic: {data.kappa: 0.2}}
"""
    (cell,) = cells_of(tmp_path, study, "rounds=1", "--clients=5")
    config = cell.config
    assert (config.local.lr, config.data.kappa, config.rounds, config.clients) == (0.2, 0.2, 1, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods: {local: {}}\nnoises: [1]\n", "unknown key noises (did you mean 'noise'?)"),
        ("noise: [1]\n", "methods is missing"),
        ("method: {local: {}}\n", "unknown key method (did you mean 'methods'?)"),
        ("methods: {fedavg: {mu_proxx: 1}}\ndata: [synthetic]\n", "mu_proxx"),
        ("methods: {fedavgg: {}}\ndata: [synthetic]\n", "fedavg"),
        ("methods: {local: {}}\ndata: [synthetic]\nnoise: [-1]\n", "channel.noise"),
        ("methods: {local: {}}\ndata: [synthetic]\nseeds: []\n", "seeds is empty"),
        ("methods: {local: {}}\ndata: [synthetic]\nseeds: [0, 0]\n", "comes twice"),
        ("methods: {local: {}}\ndata: [synthetic]\nnoise: [0.1, 0.10]\n", "s0.1_local_seed0 comes twice; give"),
        ("methods: {local: {}}\ndata: [synthetic]\nmissing_rate: [0, 0.0]\n", "would be one run twice"),
        ("methods: [local, fedavg, local]\ndata: [synthetic]\n", "methods has local twice; give each label once"),
        ("methods: [local]\ndata: [synthetic, synthetic]\n", "data has synthetic twice"),
        ("seed: 1\nlocal: {lr: 0.1}\n", "is one run, not a study; it is run by: python -m jgesr_lightning train"),
        ("local.lr: 0.1\n", "is one run, not a study"),
        ("methods: [1, {a: 2}]\n", "methods[1] holds keys"),
        ("methods: {local: {}\n", "not valid YAML"),
    ],
)
def test_a_wrong_study_stops_before_any_work(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        cells_of(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", ["seed=3", "name=x", "aggregator.name=local", "nonsense", "local.lrr=1"])
def test_overrides_that_make_no_sense_for_all_cells_are_refused(tmp_path, override):
    with pytest.raises(ConfigError):
        cells_of(tmp_path, TWO, override)


def test_an_unknown_study_names_those_there_are():
    with pytest.raises(ConfigError, match=r"no study table1_smal \(did you mean 'table1_small'\?\)"):
        load_study("table1_smal")


def test_choosing_by_pattern_and_part(tmp_path):
    cells = cells_of(tmp_path, TWO + "seeds: [0, 1, 2]\n")
    names = [cell.name for cell in choose(cells, ["local"])]
    assert names == [f"synthetic_s0.1_local_seed{seed}" for seed in range(3)]
    assert len(choose(cells, ["*_seed1", "local"])) == 4
    parts = [choose(cells, part=(part, 4)) for part in (1, 2, 3, 4)]
    assert [len(part) for part in parts] == [2, 2, 1, 1]
    assert sorted(c.name for part in parts for c in part) == sorted(c.name for c in cells)
    many = cells_of(tmp_path, TWO + "seeds: [1, 10]\n")
    assert {cell.config.seed for cell in choose(many, ["seed1"])} == {1}  # whole words first
    assert len(choose(many, ["eed1"])) == len(many)
    with pytest.raises(ConfigError, match=r"--only fedprox matches no cell; --list shows them"):
        choose(cells, ["fedprox"])
    with pytest.raises(ConfigError, match=r"--only locl matches no cell \(did you mean 'local'\?\)"):
        choose(cells, ["locl"])
    with pytest.raises(ConfigError, match="--only is empty; leave it out to choose all cells"):
        choose(cells, ["local", ""])


def test_part_from_text_or_from_slurm():
    assert parse_part(None, {}) == (1, 1)
    assert parse_part("2/3", {"SLURM_ARRAY_TASK_ID": "9"}) == (2, 3)
    array = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_STEP": "2"}
    assert parse_part(None, {**array, "SLURM_ARRAY_TASK_COUNT": "5"}) == (3, 5)
    for wrong in ("0/3", "4/3", "x", "1/0", "1/" + "9" * 5000):
        with pytest.raises(ConfigError, match="i/n"):
            parse_part(wrong, {})


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_are_valid(path):
    name, cells = load_study(path)
    assert name == path.stem
    assert len(cells) > 1


def test_the_papers_studies_hold_the_papers_cells():
    _, cells = load_study("table1")
    combinations = {(c.config.data.name, c.config.channel.noise, c.config.seed) for c in cells}
    assert len(combinations) == 2 * 2 * 10
    assert len(cells) == 10 * len(combinations)
    assert all((c.config.rounds, c.config.clients, c.config.data.fraction) == (30, 20, 1.0) for c in cells)
    assert {(c.config.local.batch_size, c.config.metric) for c in cells} == {("full", "accuracy/trained")}
    rows = {(c.config.aggregator.name, c.config.aggregator.settings.get("fidelity")) for c in cells}
    assert {("two_step", "uniform"), ("two_step", "shares"), ("jgesr", "uniform"), ("jgesr", "shares")} < rows
    _, cells = load_study("missing")
    assert sorted({c.config.channel.missing_rate for c in cells}) == [rate / 100 for rate in range(11)]


def test_lists_of_keys_on_the_command_line_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"logging.tags\[0\] holds keys of its own"):
        cells_of(tmp_path, TWO, "logging.tags=[{a: b}]")


def test_what_no_entry_is_missing_from_is_taken_over_from_the_table():
    of_table = {copied(to_dict(cell.config)) for cell in load_study("table1_tenth")[1]}
    taken = {
        cell.name: cell.config for cell in load_study("missing_tenth")[1] if copied(to_dict(cell.config)) in of_table
    }
    assert {config.channel.missing_rate for config in taken.values()} == {0.0}
    assert len(taken) == 2 * 2 * 3  # methods, data sets, seeds


def test_a_study_is_read_like_a_run(tmp_path):
    text = "methods: [local]\ndata: [synthetic]\nseeds: [010]\nsettings: {logging.project: no, rounds: 007}\n"
    (cell,) = cells_of(tmp_path, text)
    assert (cell.config.seed, cell.config.logging.project, cell.config.rounds) == (10, "no", 7)
    assert cell.name == "synthetic_s0.1_local_seed10"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("settings: {rounds: 1:30}", "rounds is '1:30'; it must be a whole number"),
        ("noise: [0.1, yes]", "channel.noise is 'yes'; it must be a number"),
        ("missing_rate: [0, 1.5]", "channel.missing_rate is 1.5"),
        ("settings: [a]", "settings is a list"),
        ("base: [a]", "base is a list"),
        ("base: mnist_quik", "base is 'mnist_quik'; no configuration file mnist_quik (did you mean"),
        ("base: ~nobody-here/a.yaml", "~nobody-here/a.yaml names no place: there is no user 'nobody-here'"),
        ("base:", "base is ''; it must be text that is not blank"),
        ("seeds: [0, 1.5]", "seeds[1] is '1.5'; it must be a whole number"),
        ("grid: {local.lrr: [1, 2]}", "local.lrr"),
        ("grid: {local: {lr: [1]}}", "grid.local"),
        ("grid: {channel.noise: [0.1, 0.2]}", "grid cannot hold channel.noise: write noise"),
        ("grid: {seed: [1, 2]}", "grid cannot hold seed: write seeds"),
        ("grid: {name: [a, b]}", "grid cannot hold name"),
        ("data: {syn: {name: synthetic}}", "data.syn cannot hold name: write data.name"),
        ("settings: {output_dir: x}", "settings cannot hold output_dir: give it on the command line"),
        ("settings: {aggregator: {name: fedavg}}", "settings cannot hold aggregator.name: write methods"),
        ("data: {synthetic: {channel.noise: 1}}\nnoise: 1", "data.synthetic cannot hold channel.noise: write noise"),
        ("methods: {local: {data.name: mnist}}", "methods.local cannot hold data.name: write data"),
        ("metric: loss/train", "metric is 'loss/train'"),
        ("name: x", "unknown key name"),
    ],
)
def test_every_cell_is_checked_first_and_mistakes_have_their_line(tmp_path, text, message):
    (tmp_path / "base.yaml").write_text(BASE)
    lines = {"base": f"base: {tmp_path / 'base.yaml'}", "methods": "methods: [local]", "data": "data: [synthetic]"}
    lines[text.partition(":")[0]] = text
    path = tmp_path / "tiny.yaml"
    path.write_text("\n".join(lines.values()))
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert message in str(caught.value)
    assert f"{path}, line {list(lines.values()).index(text) + 1}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", ["local.lr: [0.01, 1e-2]", "metric: [accuracy/trained, accuracy/received]"])
def test_values_of_a_grid_that_make_no_other_run_are_refused(tmp_path, values):
    with pytest.raises(ConfigError, match=r"twice; (give each value|leave one out)"):
        cells_of(tmp_path, f"{TWO}grid: {{{values}}}\n")


def test_an_axis_of_the_grid_is_not_set_for_all_cells(tmp_path):
    cells_of(tmp_path, TWO + "grid: {participation: [0.5]}\n")
    with pytest.raises(ConfigError, match=r"participation is an axis of this study's grid, which .*tiny.yaml sets"):
        load_study(tmp_path / "tiny.yaml", ["participation=0.3"])


def test_files_of_parts_lie_beside_the_study_and_data_where_it_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    settings = "settings: {data.partition: shares.json, data.root: blobs.npz}\n"
    (cell, *_) = cells_of(tmp_path / "deep", TWO.replace("synthetic", "tensors") + settings)
    for config in (cell.config, load_config(cell.base, cell.overrides)):
        assert (config.data.partition, config.data.root) == (f"{tmp_path}/deep/shares.json", f"{tmp_path}/blobs.npz")


def test_a_file_that_is_no_utf8_is_one_line(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_bytes("# größer\nbase: base\nmethods: [local]\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_study(path)


def test_a_grid_crosses_settings_with_everything(tmp_path):
    cells = cells_of(tmp_path, TWO + "grid: {local.batch_size: [full, 8], model.name: [lenet, fedavg_cnn]}\nseeds: 3\n")
    assert len(cells) == 2 * 2 * 2
    assert cells[0].name == "synthetic_s0.1_local_full_lenet_seed3"
    assert {(c.config.local.batch_size, c.config.model.name) for c in cells} == {
        ("full", "lenet"), ("full", "fedavg_cnn"), (8, "lenet"), (8, "fedavg_cnn"),
    }  # fmt: skip
    for cell in cells:
        assert repr(load_config(cell.base, cell.overrides)) == repr(cell.config)


def test_what_the_file_does_not_say_is_the_bases(tmp_path):
    (tmp_path / "own.py").write_text("def mine(root):\n    pass\n")
    base = BASE.replace("name: synthetic", "name: ./own.py:mine, root: sites")
    base += "seed: 7\nchannel: {noise: 0.50, missing_rate: 0.3}\n"
    path = write_study(tmp_path, "methods: {fedavg: {}}\ngrid: {local.lr: [0.1, 0.2]}\n", base)
    cells = load_study(path)[1]
    assert [cell.name for cell in cells] == [f"mine_s0.5_m0.3_fedavg_{lr}_seed7" for lr in (0.1, 0.2)]
    for cell in cells:
        config = cell.config
        assert (config.data.name, config.data.root) == (f"{tmp_path}/own.py:mine", os.path.abspath("sites"))
        assert (config.channel.noise, config.channel.missing_rate, config.seed) == (0.5, 0.3, 7)
        assert load_config(cell.base, cell.overrides) == config
    path.write_text(path.read_text() + "noise: 1\nmissing_rate: [0]\nseeds:\ndata: synthetic\n")
    assert load_study(path)[1][0].name == "synthetic_s1_fedavg_0.1_seed7"
    path.write_text("base: base\nmethods: [local]\n")
    assert [cell.name for cell in load_study(path)[1]] == ["mnist_s0.1_local_seed0"]


def test_a_cell_is_called_the_same_however_a_number_is_written(tmp_path):
    def called(noise, rate, fraction, lr):
        axes = f"noise: [{noise}]\nmissing_rate: [{rate}]\ngrid: {{data.fraction: [{fraction}], local.lr: [{lr}]}}\n"
        return [cell.name for cell in cells_of(tmp_path, "methods: [local]\ndata: [synthetic]\n" + axes)]

    assert called("1", "0.1", "1", "0.01") == ["synthetic_s1_m0.1_local_1_0.01_seed0"]
    assert called("1.0", "1e-1", "1.00", "1e-2") == called("1", "0.1", "1", "0.01") == called("1e0", ".10", "01", ".01")


def test_a_studys_metric_is_that_of_its_cells(tmp_path):
    assert {c.config.metric for c in cells_of(tmp_path, TWO)} == {"accuracy/received"}
    cells = cells_of(tmp_path, TWO + "metric: accuracy/trained\n")
    assert {c.config.metric for c in cells} == {"accuracy/trained"}
    assert cells_of(tmp_path, TWO + "metric: accuracy/trained\n", "metric=accuracy/received")[0].config.metric == (
        "accuracy/received"
    )


def test_methods_of_a_users_file_are_taken_from_beside_the_study(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jgesr_lightning.aggregators.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n"
    )
    methods = "{./mine.py:Mine: {}, labelled: {name: ./mine.py:Mine, local.lr: 0.5}}"
    cells = cells_of(tmp_path, f"methods: {methods}\ndata: [synthetic]\n")
    assert [cell.name for cell in cells] == ["synthetic_s0.1_Mine_seed0", "synthetic_s0.1_labelled_seed0"]
    assert {cell.config.aggregator.name for cell in cells} == {f"{tmp_path / 'mine.py'}:Mine"}
    for cell in cells:
        assert repr(load_config(cell.base, cell.overrides)) == repr(cell.config)


@pytest.mark.parametrize(
    ("ids", "places"),
    [
        ([3, 7], [1, 2]),
        (list(range(10)), list(range(1, 11))),
        ([0, 2, 4, 6], [1, 2, 3, 4]),
        ([5], [1]),
        ([1, 2, 5], [1, None, 3]),
        ([0, 1, 2, 7, 8], [1, None, 2, None, 5]),
    ],
)
def test_array_tasks_share_the_cells_by_their_place_or_are_refused(ids, places):
    found = []
    for task in ids:
        environment = {
            "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": str(min(ids)),
            "SLURM_ARRAY_TASK_MAX": str(max(ids)), "SLURM_ARRAY_TASK_COUNT": str(len(ids)),
            "SLURM_ARRAY_TASK_STEP": "1",
        }  # fmt: skip
        try:
            place, count = parse_part(None, environment)
            assert count == len(ids)
            found.append(place)
        except ConfigError:
            found.append(None)
    assert found == places
    # never silently: all parts are there, or somebody refuses
    assert None in found or sorted(found) == list(range(1, len(ids) + 1))


def test_junk_in_an_array_tasks_variables_is_one_line():
    for name in ("ID", "MIN", "MAX", "COUNT"):
        environment = {f"SLURM_ARRAY_TASK_{key}": "4" for key in ("ID", "MIN", "MAX", "COUNT")}
        with pytest.raises(ConfigError, match=f"SLURM_ARRAY_TASK_{name} is 'x'"):
            parse_part(None, {**environment, f"SLURM_ARRAY_TASK_{name}": "x"})


def test_the_readings_cross_batch_size_and_network_on_the_two_calibrated_methods():
    for name in ("readings", "readings_small"):
        _, cells = load_study(name)
        config = [cell.config for cell in cells]
        assert len({cell.name for cell in cells}) == len(cells) == 2 * 3 * 2 * 2 * 2
        assert {c.aggregator.name for c in config} == {"fedavg", "fedprox"}
        assert {(c.local.batch_size, c.model.name) for c in config} == {
            (size, net) for size in ("full", 128, 10) for net in ("lenet", "fedavg_cnn")
        }


def test_labels_of_data_may_be_links(tmp_path):
    (tmp_path / "links.py").write_text("def bursts(model, length: int = 5):\n    return model\n")
    text = """
methods: [local, fedavg]
data:
  paper: {data.name: synthetic, channel.noise: 0.2, channel.missing_rate: 0.1}
  short: {data.name: synthetic, channel.name: "./links.py:bursts", channel.noise: 0, channel.length: 3}
  long: {data.name: synthetic, channel.name: "./links.py:bursts", channel.noise: 0, channel.length: 30}
"""
    cells = cells_of(tmp_path, text)
    names = ["paper_s0.2_m0.1", "short_s0", "long_s0"]
    assert [cell.name for cell in cells] == [f"{n}_{m}_seed0" for n in names for m in ("local", "fedavg")]
    channels = [cell.config.channel for cell in cells[::2]]
    assert [channel.noise for channel in channels] == [0.2, 0, 0]
    assert [channel.missing_rate for channel in channels] == [0.1, 0, 0]
    assert [channel.settings for channel in channels] == [{}, {"length": 3}, {"length": 30}]
    for cell in cells:  # what its process is told is the same
        assert to_dict(load_config(cell.base, list(cell.overrides))) == to_dict(cell.config)
    again = text + "  again: {data.name: synthetic, channel.noise: 0.20, channel.missing_rate: 0.1}\n"
    with pytest.raises(ConfigError, match=r"paper_s0.2_m0.1_local_seed0 and again_\S+ would be one run twice"):
        cells_of(tmp_path, again)
    with pytest.raises(ConfigError, match=r"data.paper cannot hold channel.noise: write noise"):
        cells_of(tmp_path, text + "noise: [0.1]\n")
