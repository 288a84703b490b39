"""The client: its proximal term is right however it is trained, copied, converted or loaded."""

import copy
import io

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from jgesr_lightning.client import ClientModule
from jgesr_lightning.models import build_model
from jgesr_lightning.regularisers import CosineDissimilarity

MU, LR = 0.7, 0.1


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(n=8, dtype=torch.float32, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=draw).to(dtype), torch.randint(3, (n,), generator=draw)


def row_of(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def by_hand(net, mu, steps, data, anchor=None, lr=LR, momentum=0.0):
    """Return the parameters after `steps` of w <- w - lr (grad + mu (w - w0)), with heavy-ball momentum."""
    net = copy.deepcopy(net)
    w0 = row_of(net) if anchor is None else anchor
    velocity = torch.zeros_like(w0)
    for _ in range(steps):
        grads = torch.autograd.grad(cross_entropy(net(data[0]), data[1]), list(net.parameters()))
        grad = torch.cat([g.reshape(-1) for g in grads])
        if mu:
            grad = grad + mu * (row_of(net) - w0)
        velocity = momentum * velocity + grad
        torch.nn.utils.vector_to_parameters(row_of(net) - lr * velocity, net.parameters())
    return row_of(net)


def train(client, steps, data):
    optimizer = client.configure_optimizers()
    for _ in range(steps):
        optimizer.zero_grad()
        client.training_step(data, 0).backward()
        optimizer.step()
    return row_of(client.net)


class Quadratic(nn.Module):
    """Scores whose cross entropy is not used: the loss is replaced by 1/2 ||A w - b||^2 below."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))


def test_second_step_on_a_quadratic(monkeypatch):
    A = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, -1.0]], dtype=torch.float64)
    b = torch.tensor([1.0, 4.0], dtype=torch.float64)
    net = Quadratic()
    monkeypatch.setattr(net, "forward", lambda x: net.w)
    monkeypatch.setattr("jgesr_lightning.client.cross_entropy", lambda w, y: 0.5 * (A @ w - b).square().sum())
    w0 = net.w.detach().clone()
    client = ClientModule(net, proximal_mu=MU, lr=LR)
    w1 = train(client, 1, (None, None))
    g0 = A.T @ (A @ w0 - b)
    torch.testing.assert_close(w1, w0 - LR * g0, rtol=0, atol=1e-15)
    w2 = train(client, 1, (None, None))
    g1 = A.T @ (A @ w1 - b)
    torch.testing.assert_close(w2, w1 - LR * (g1 + MU * (w1 - w0)), rtol=0, atol=1e-14)


def test_mu_zero_is_plain_sgd_bit_for_bit():
    net, data = small_net(), batch()
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(plain(data[0]), data[1]).backward()
        optimizer.step()
    assert torch.equal(train(ClientModule(net, 0.0, LR), 5, data), row_of(plain))


def test_loss_is_cross_entropy_plus_half_mu_squared_distance():
    client, data = ClientModule(small_net(), MU, LR), batch()
    sent = row_of(client.net)
    train(client, 2, data)
    distance = (row_of(client.net) - sent).square().sum()
    expected = cross_entropy(client(data[0]), data[1]) + 0.5 * MU * distance
    torch.testing.assert_close(client.training_step(data, 0), expected)


def test_the_anchor_never_changes_while_training():
    client = ClientModule(small_net(), MU, LR)
    sent = client.sent.clone()
    train(client, 4, batch())
    assert torch.equal(client.sent, sent)
    assert not torch.equal(row_of(client.net), sent)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_hand_rolled_loop(momentum):
    net, data = small_net().double(), batch(dtype=torch.float64)
    expected = by_hand(net, MU, 4, data, momentum=momentum)
    client = ClientModule(net, MU, LR, momentum)
    torch.testing.assert_close(train(client, 4, data), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_either_way_of_zeroing_gradients(set_to_none):
    net, data = small_net().double(), batch(dtype=torch.float64)
    expected = by_hand(net, MU, 3, data)
    client = ClientModule(net, MU, LR)
    optimizer = client.configure_optimizers()
    for _ in range(3):
        client.zero_grad(set_to_none=set_to_none)
        client.training_step(data).backward()
        optimizer.step()
    torch.testing.assert_close(row_of(client.net), expected, rtol=0, atol=1e-13)


def test_under_the_trainer():
    net, data = small_net(), batch(12)
    expected = by_hand(net, MU, 3, data)
    client = ClientModule(net, MU, LR)
    loader = DataLoader(TensorDataset(*data), batch_size=12)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    Trainer(max_epochs=3, accelerator="cpu", devices=1, **quiet).fit(client, loader)
    torch.testing.assert_close(row_of(client.net), expected, rtol=0, atol=1e-6)


def test_a_checkpoint_of_the_trainer_keeps_the_anchor(tmp_path):
    data = batch(12)
    client = ClientModule(small_net(), MU, LR)
    sent = client.sent.clone()
    loader = DataLoader(TensorDataset(*data), batch_size=12)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=2, default_root_dir=tmp_path, devices=1, **quiet)
    trainer.fit(client, loader)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = ClientModule(small_net(seed=9), MU, LR)
    Trainer(max_epochs=4, default_root_dir=tmp_path, devices=1, **quiet).fit(
        resumed, loader, ckpt_path=tmp_path / "two.ckpt"
    )
    assert torch.equal(resumed.sent, sent)
    torch.testing.assert_close(row_of(resumed.net), by_hand(small_net(), MU, 4, data), rtol=0, atol=1e-6)


def test_a_deep_copy_anchors_itself():
    client, data = ClientModule(small_net(), MU, LR), batch()
    twin = copy.deepcopy(client)
    other = small_net(seed=3)
    twin.net.load_state_dict(other.state_dict())
    assert torch.equal(twin.sent, row_of(other))
    assert torch.equal(client.sent, row_of(small_net())), "loading the copy moved the original's anchor"
    torch.testing.assert_close(train(twin, 3, data), by_hand(other, MU, 3, data))
    torch.testing.assert_close(train(client, 3, data), by_hand(small_net(), MU, 3, data))


def test_a_saved_and_loaded_module_anchors_itself():
    file = io.BytesIO()
    torch.save(ClientModule(small_net(), MU, LR), file)
    file.seek(0)
    client = torch.load(file, weights_only=False)
    other = small_net(seed=3)
    client.load_state_dict({f"net.{k}": v for k, v in other.state_dict().items()})
    torch.testing.assert_close(train(client, 3, batch()), by_hand(other, MU, 3, batch()))


def test_conversion_midway():
    data = batch(dtype=torch.float64)
    client = ClientModule(small_net(), MU, LR)
    sent = client.sent.double()
    train(client, 1, batch())
    client.double()
    assert client.sent.dtype == torch.float64 and torch.equal(client.sent, sent)
    expected = by_hand(client.net, MU, 3, data, anchor=sent)
    torch.testing.assert_close(train(client, 3, data), expected, rtol=0, atol=1e-13)


def test_conversion_of_the_network_alone():
    client, data = ClientModule(small_net(), MU, LR), batch(dtype=torch.float64)
    client.net.double()
    torch.testing.assert_close(train(client, 3, data), by_hand(small_net().double(), MU, 3, data), rtol=0, atol=1e-13)


@pytest.mark.parametrize("whole", [True, False])
def test_loading_a_state_dict_sets_the_anchor(whole):
    client, other = ClientModule(small_net(), MU, LR), small_net(seed=3)
    train(client, 2, batch())
    if whole:
        client.load_state_dict(ClientModule(other).state_dict())
    else:
        client.net.load_state_dict(other.state_dict())
    assert torch.equal(client.sent, row_of(other))
    torch.testing.assert_close(train(client, 3, batch()), by_hand(other, MU, 3, batch()))


def test_a_state_dict_holds_the_network_alone():
    client = ClientModule(small_net(), MU)
    assert set(client.state_dict()) == {f"net.{name}" for name in client.net.state_dict()}


def test_receive_copies_the_row():
    client = ClientModule(build_model("lenet", 1, 28, 10), MU, LR)
    row = torch.randn(client.layout.size)
    kept = row.clone()
    client.receive(row)
    assert torch.equal(client.sent, row) and torch.equal(row_of(client.net), row)
    data = (torch.randn(4, 1, 28, 28), torch.arange(4))
    train(client, 2, data)
    assert torch.equal(row, kept) and torch.equal(client.sent, kept)


def test_an_anchor_taken_in_inference_mode_can_be_trained_from():
    client = ClientModule(small_net(), MU, LR)
    with torch.inference_mode():
        client.net.double()
        client.receive(row_of(small_net(seed=3)).double())
    client.net.float()
    assert not client.sent.is_inference()
    client.training_step(batch()).backward()


def test_every_method_s_penalty_enters_the_loss():
    sent = row_of(small_net())
    client = ClientModule(small_net(), MU, LR, terms=[CosineDissimilarity(0.3)])
    train(client, 2, batch())
    x = row_of(client.net)
    expected = cross_entropy(client(batch()[0]), batch()[1]) + 0.5 * MU * (x - sent).square().sum()
    expected = expected - 0.3 * torch.nn.functional.cosine_similarity(x, sent, dim=0)
    torch.testing.assert_close(client.training_step(batch()), expected)


def test_penalties_leave_frozen_parameters_alone():
    client = ClientModule(small_net(), MU, LR)
    client.net[1].weight.requires_grad_(False)
    before = client.net[1].weight.clone()
    train(client, 3, batch())
    assert torch.equal(client.net[1].weight, before)


@pytest.mark.parametrize("setting", ["proximal_mu", "lr", "momentum"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), "0.1"])
def test_bad_settings_are_named(setting, value):
    with pytest.raises(ValueError, match=setting):
        ClientModule(small_net(), **{setting: value})
