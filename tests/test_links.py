"""Links of somebody's own: functions of one client's model, in place of the channel of the paper."""

import csv
import json
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jgesr_lightning import cli
from jgesr_lightning.channel import OwnUplink, Uplink, build_uplink
from jgesr_lightning.config import Config, ConfigError, load_config, to_yaml
from jgesr_lightning.config.schema import ChannelConfig
from jgesr_lightning.identity import condition
from jgesr_lightning.names import code_of
from jgesr_lightning.reporting.paper import is_papers
from tests.processes import models, together, write_config

LINKS = """
import random
import numpy as np
import torch

def clean(model): return model
def silent(model, previous): return previous
def bursts(model, noise_std, missing_rate, length: int = 3):
    begins = torch.rand(len(model)) < 1 - (1 - missing_rate) ** (1 / length)
    lost = torch.zeros(len(model), dtype=torch.bool)
    for at in begins.nonzero().flatten().tolist():
        lost[at : at + length] = True
    return model + noise_std * torch.randn(len(model)), ~lost
def told(model, previous, round, client, noise_std, missing_rate):
    return torch.tensor([previous.sum(), round, client, noise_std, missing_rate]).to(model)
def draws(model): return torch.tensor([torch.rand(()), random.random(), np.random.rand()]).to(model)
def spoils(model): return model.mul_(2)
def needs(model, gain: float): return gain * model
def short(model): return model[:-1]
def whole(model): return model.long()
def wave(model): return (1 + 1j) * model
def sparse(model): return model.to_sparse()
def nan(model): return model / 0
def uneven(model, client): return model * [1.0, 2.0][client]
def normed(model, previous, round): return model / previous.norm() if round else None
def update(model, previous): return previous + (model - previous) / (model - previous).norm()
def outage(model, client): return model, torch.full((len(model),), client > 1)
def last(round, model): return model
def only(*, model): return model
def counts(model): return model, torch.ones(len(model))
def late(model, round):
    if round == 2:
        raise RuntimeError("no carrier")
    return model
def nothing(): return 1
def reserved(model, noise=1.0): return model
class Made:
    def __init__(self, model): pass
"""


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "links.py").write_text(LINKS)
    monkeypatch.chdir(tmp_path)
    return lambda name, **settings: build_uplink(f"./links.py:{name}", settings, *[0.5, 0.3], 7)


def test_what_a_link_returns_arrives(own):
    sent = torch.randn(4, 6)
    received, mask = own("clean")(sent, 1)
    assert torch.equal(received, sent) and mask.all() and received.data_ptr() != sent.data_ptr()
    before = torch.randn(4, 6)
    assert torch.equal(own("silent")(sent, 1, None, before)[0], before)
    assert torch.equal(own("spoils")(sent, 1)[0], 2 * sent)  # a copy is spoilt, not what was sent
    torch.testing.assert_close(own("needs", gain=3.0)(sent.double(), 1)[0], 3 * sent.double())


def test_it_gets_what_it_names(own):
    previous = torch.arange(10.0).reshape(2, 5)
    received, _ = own("told")(torch.zeros(2, 5), 4, [3, 8], previous)
    expected = [[10, 4, 3, 0.5, 0.3], [35, 4, 8, 0.5, 0.3]]
    torch.testing.assert_close(received, torch.tensor(expected))


def test_what_did_not_arrive_is_zero_and_lost_in_runs(own):
    sent = torch.full((3, 3000), 7.0)
    received, mask = own("bursts", length=5)(sent, 1)
    assert (received[~mask] == 0).all() and (received[mask] != 0).all()
    assert 0.25 < float((~mask).float().mean()) < 0.35
    for row in (~mask).long():
        edges = torch.nn.functional.pad(row, (1, 1)).diff()
        begin, end = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
        assert (end - begin)[end < 3000].min() >= 5
    noise = (received - sent)[mask]
    torch.testing.assert_close(float(noise.std()), 0.5, rtol=0.05, atol=0)


@given(st.permutations(range(5)), st.integers(1, 4))
def test_draws_follow_seed_round_and_client_alone(tmp_path_factory, order, cut):
    path = tmp_path_factory.getbasetemp() / "drawing.py"
    path.write_text(LINKS)
    link = OwnUplink(f"{path}:draws", {}, 0.0, 0.0, 1)
    sent = torch.zeros(5, 3, dtype=torch.float64)
    whole, _ = link(sent, 2)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    parts = torch.cat([link(sent[:cut], 2, order[:cut])[0], link(sent[cut:], 2, order[cut:])[0]])
    assert torch.equal(parts, whole[list(order)])
    assert len(whole.unique()) == 15 and not torch.equal(whole, link(sent, 3)[0])
    assert not torch.equal(whole, OwnUplink(f"{path}:draws", {}, 0.0, 0.0, 2)(sent, 2)[0])
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(states[0], after[0]) and states[1:] == after[1:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"short gave torch.float32, shape \(5,\) for received; .* shape \(6,\)"),
        ("whole", r"whole gave torch.int64, shape \(6,\) for received; it must be a tensor of real numbers"),
        ("wave", r"wave gave torch.complex64"),
        ("sparse", r"sparse gave torch.float32, shape \(6,\), torch.sparse_coo for received"),
        ("counts", r"counts gave torch.float32, shape \(6,\) for mask; it must be a tensor of True or False"),
        ("nothing", r"nothing must be a function of a model, which comes first and by position"),
        ("only", r"only must be a function of a model, which comes first and by position"),
        ("torch.clone", r"clone must be a function of a model, which comes first and by position"),
        ("last", r"last takes round first; it must take the model first"),
        ("Made", r"Made is a class; it must be a function"),
        ("gone", r"holds no gone"),
    ],
)
def test_what_is_no_link_is_named(own, name, message):
    with pytest.raises(ValueError, match=message):
        own(name)(torch.zeros(2, 6), 1)


def error_of(*settings):
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings)
    return str(caught.value)


@pytest.mark.usefixtures("own")
def test_settings_of_a_link_stand_beside_its_name(tmp_path):
    config = load_config(None, ["channel.name=./links.py:bursts", "channel.length=4"])
    assert config.channel.settings == {"length": 4} and config.channel.name == f"{tmp_path}/links.py:bursts"
    (tmp_path / "back.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "back.yaml").replace(name="run") == config.replace(name="run")
    assert load_config(None, ["channel.name=./links.py:bursts"]).channel.settings == {"length": 3}
    one = load_config(None, ["channel.name=./links.py:bursts", "channel.length=${clients}"])
    assert one.channel.settings == {"length": 20}
    assert "channel.length is 'x'; it must be a whole number" in error_of(
        "channel.name=./links.py:bursts", "channel.length=x"
    )
    assert (
        "channel.lenth is no setting of bursts (did you mean 'length'?); its settings: noise, missing_rate"
        in error_of("channel.name=./links.py:bursts", "channel.lenth=4")
    )
    missing = error_of("channel.name=./links.py:needs", "channel.noise=0")
    assert "channel.gain is missing; needs has no default for it" in missing
    assert "its setting noise must be called otherwise" in error_of(
        "channel.name=./links.py:reserved", "channel.noise=0"
    )
    other = config.channel.replace(name="./links.py:clean", noise=0.0, missing_rate=0.0)
    assert other.settings == {} and config.channel.replace(noise=0.3).settings == {"length": 4}


def test_our_channel_has_no_settings_of_its_own():
    unknown = "channel.nois is no setting of gaussian (did you mean 'noise'?); its settings: noise, missing_rate"
    assert unknown in error_of("channel.nois=1")
    with pytest.raises(ConfigError, match=re.escape(unknown)):
        ChannelConfig(nois=1)
    for key, meant in (("snr", "channel.noise"), ("kappa", "data.kappa"), ("lr", "local.lr"), ("seed", "seed")):
        assert f"channel.{key} is no setting of gaussian (did you mean '{meant}'?)" in error_of(f"channel.{key}=1")
    assert "did you mean 'gaussian'" in error_of("channel.name=gausian")


@pytest.mark.usefixtures("own")
def test_levels_that_a_link_does_not_ask_for_are_refused():
    assert "channel.noise is 0.1; clean takes no noise_std, so it must be 0" in error_of(
        "channel.name=./links.py:clean"
    )
    lost = error_of("channel.name=./links.py:clean", "channel.noise=0", "channel.missing_rate=0.2")
    assert "channel.missing_rate is 0.2; clean takes no missing_rate" in lost


@pytest.mark.usefixtures("own")
def test_each_client_s_link_is_tried_by_itself(own):
    seen = []
    link = own("clean")
    link.function = lambda model: seen.append(model) or model
    link.try_out(torch.ones(4), 3)
    assert [model.tolist() for model in seen] == [[1.0] * 4] * 3


@pytest.mark.usefixtures("own")
def test_another_link_in_a_later_layer_has_its_own_settings(tmp_path, caplog):
    (tmp_path / "run.yaml").write_text("channel: {name: './links.py:bursts', length: 9}\n")
    assert load_config(tmp_path / "run.yaml", ["channel.name=gaussian"]).channel.settings == {}
    assert "channel.name=gaussian: settings of" in caplog.text and "not used: length=9" in caplog.text


@pytest.mark.usefixtures("own")
def test_a_run_is_told_by_its_link(tmp_path, capsys):
    path = write_config(tmp_path, rounds=2)
    link = f"channel.name={tmp_path}/links.py:"
    assert cli.main(["train", str(path), "name=plain", "channel.noise=0"]) == 0
    assert cli.main(["train", str(path), "name=same", "channel.noise=0", f"{link}clean"]) == 0
    assert "link clean, noise 0" in capsys.readouterr().err
    plain, same = (models(tmp_path / "runs" / name) for name in ("plain", "same"))
    assert torch.equal(plain, same)  # nothing is lost on either
    assert cli.main(["train", str(path), "name=back", "channel.noise=0", f"{link}silent"]) == 0
    back = models(tmp_path / "runs" / "back")
    assert len(back.unique(dim=0)) == 1  # the server got back what it had sent, in each round
    summaries = [json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("plain", "same")]
    assert [summary["channel"] for summary in summaries] == ["gaussian", "clean"]
    ours, theirs = (summary["config"] for summary in summaries)
    assert condition(ours) == condition(theirs) | {"channel.name": "gaussian"} != condition(theirs)
    assert list(code_of(theirs)) == list(summaries[1]["code"]) == ["channel.name"]
    (tmp_path / "links.py").unlink()  # what has been made can be read without it
    assert cli.main(["table", str(tmp_path / "runs")]) == 0
    table = capsys.readouterr().out
    assert "synthetic over silent s=0" in table and "link silent" in table and "channel.name=silent" in table


@pytest.mark.usefixtures("own")
def test_a_link_is_tried_before_any_work_and_named_when_it_breaks_later(tmp_path, capsys):
    path = write_config(tmp_path, rounds=3)
    link = f"channel.name={tmp_path}/links.py:"
    assert cli.main(["train", str(path), "channel.noise=0", f"{link}short"]) == 2
    assert "short gave torch.float64" in capsys.readouterr().err and not (tmp_path / "runs").exists()
    for name, message in (("nan", "nan makes the initial model NaN"), ("uneven", "uneven failed: IndexError")):
        assert cli.main(["train", str(path), "channel.noise=0", f"{link}{name}"]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "runs").exists()
    assert cli.main(["train", str(path), "channel.noise=0", f"{link}normed", "rounds=1", "name=normed"]) == 0
    assert cli.main(["train", str(path), "channel.noise=0", f"{link}late"]) == 1
    error = capsys.readouterr().err
    assert "late failed: RuntimeError: no carrier" in error and "links.py, line" in error
    assert "round 1" in error and "traceback.txt" in error  # what is saved, and where it happened


@pytest.mark.usefixtures("own")
def test_only_those_who_take_part_send_and_count(tmp_path):
    path = write_config(tmp_path, rounds=1)
    link = f"channel.name={tmp_path}/links.py:"
    # of those who did not train, the update is zero, and cannot be divided by its length
    half = ["channel.noise=0", "participation=0.6", "name=half"]
    assert cli.main(["train", str(path), *half, f"{link}told"]) == 2  # five numbers are no model
    assert cli.main(["train", str(path), *half, f"{link}outage"]) == 0
    rows = read_csv(tmp_path / "runs" / "half" / "metrics.csv")
    sent = [row for row in read_csv(tmp_path / "runs" / "half" / "clients.csv") if row["round"] == "1"]
    counted = [int(row["client"]) for row in sent if float(row["participated"])]
    assert 0 < len(counted) < 4 and min(counted) > 1 and float(rows[1]["participants"]) == len(counted)
    assert float(rows[1]["dropped"]) == 0 and float(rows[1]["aggregator/participants"]) == len(counted)


def test_absent_clients_do_not_go_through_the_link(tmp_path):
    (tmp_path / "update.py").write_text("""
def update(model, previous, round):
    moved = float((model - previous).norm())
    assert moved > 0 or round == 1  # the trial, in which nobody trained
    return model
""")
    path = write_config(tmp_path, rounds=3, participation=0.4)
    assert cli.main(["train", str(path), "channel.noise=0", f"channel.name={tmp_path}/update.py:update"]) == 0


@pytest.mark.usefixtures("own")
def test_methods_are_told_what_is_known_of_the_noise(tmp_path, capsys, own):
    assert own("clean").known_noise(3) is None
    assert own("bursts").known_noise(3).tolist() == Uplink(0.5).known_noise(3).tolist() == [0.5] * 3
    path = write_config(tmp_path, rounds=1, aggregator={"name": "jgesr", "noise_correction": "known"})
    assert cli.main(["train", str(path), "channel.noise=0", f"channel.name={tmp_path}/links.py:clean"]) == 2
    assert "its noise is not known, which jgesr needs" in capsys.readouterr().err
    path = write_config(tmp_path, rounds=1, aggregator={"name": "jgesr", "own": "clean"})
    assert cli.main(["train", str(path), "channel.noise=0", f"channel.name={tmp_path}/links.py:silent"]) == 2
    assert "which asks for `previous`; with own=clean" in capsys.readouterr().err
    path = write_config(tmp_path, rounds=1, aggregator={"name": "fedavg"})
    command = ["train", str(path), "channel.noise=0", f"channel.name={tmp_path}/links.py:silent"]
    assert cli.main([*command, "downlink.missing_rate=0.1"]) == 2
    assert "which asks for `previous`; with a downlink that is not perfect" in capsys.readouterr().err


@pytest.mark.usefixtures("own")
def test_a_link_that_was_moved_is_named_anew_over_its_run_s_file(tmp_path):
    (tmp_path / "run.yaml").write_text("channel: {name: /gone/links.py:bursts, length: 9}\n")
    found = load_config(tmp_path / "run.yaml", ["channel.name=./links.py:bursts"]).channel
    assert found.name == f"{tmp_path}/links.py:bursts" and found.settings == {"length": 9}
    assert load_config(tmp_path / "run.yaml", ["channel.name=gaussian"]).channel.settings == {}
    with pytest.raises(ConfigError, match=r"there is no file /gone/links.py"):
        load_config(tmp_path / "run.yaml")


def test_a_link_of_one_s_own_is_not_the_paper_s_experiment():
    assert is_papers({"clients": 20, "channel.name": "gaussian"})
    assert not is_papers({"clients": 20, "channel.name": "/home/me/links.py:bursts"})
    assert not is_papers({"clients": 20, "downlink.noise": 0.1}) and is_papers({"clients": 20, "downlink.noise": 0.0})


def test_a_downlink_is_said_and_told_in_tables(tmp_path, capsys):
    path = write_config(tmp_path, rounds=1)
    assert cli.main(["train", str(path), "downlink.noise=0.2", "downlink.missing_rate=0.1"]) == 0
    assert "downlink noise 0.2, missing 0.1, seed" in capsys.readouterr().err
    assert cli.main(["table", str(tmp_path / "runs")]) == 0
    assert "noise of the downlink 0.2, missing rate of the downlink 0.1" in capsys.readouterr().out
    assert cli.main(["train", str(path), "downlink.missing_rate=1"]) == 2
    assert "downlink.missing_rate" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.usefixtures("own")
def test_a_link_computes_the_same_on_two_processes(tmp_path):
    for world in (1, 2):
        path = write_config(tmp_path / str(world), rounds=2)
        link = [f"channel.name={tmp_path}/links.py:bursts", "channel.missing_rate=0.3", "channel.noise=0.2"]
        started = together(world, ["train", path, f"runtime.devices={world}", *link], tmp_path / str(world))
        assert [process.wait() for process in started] == [0] * world, started[0].output
    one, two = (models(tmp_path / str(world) / "runs" / "tiny") for world in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


def test_the_paper_s_channel_is_the_default():
    assert Config().channel.name == "gaussian"
    assert type(build_uplink("gaussian", {}, 0.1, 0.0, 0)) is Uplink
