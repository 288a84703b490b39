import pytest
import torch

from jgesr_lightning.data.dataset import DataError, make_dataset, statistics
from jgesr_lightning.data.synthetic import make_synthetic


def images_of(n, channels=3, side=8, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, side, side), generator=rng, dtype=torch.uint8)


def test_statistics_equal_those_of_the_floats():
    images = images_of(50)
    mean, std = statistics(images)
    floats = images.double() / 255
    torch.testing.assert_close(mean, floats.mean(dim=(0, 2, 3)), rtol=0, atol=1e-12)
    torch.testing.assert_close(std, floats.std(dim=(0, 2, 3), correction=0), rtol=0, atol=1e-12)


def test_normalised_training_pixels_have_mean_0_and_deviation_1():
    images, labels = images_of(200), torch.arange(200) % 3
    dataset = make_dataset("x", (images, labels), (images_of(9, seed=1), labels[:9]), ("a", "b", "c"))
    x = dataset.normalise(dataset.train_inputs)
    assert x.dtype == torch.float32 and x.is_contiguous()
    torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std(dim=(0, 2, 3)), torch.ones(3), rtol=0, atol=1e-4)
    assert dataset.normalise(dataset.test_inputs, torch.float64).dtype == torch.float64
    assert torch.equal(dataset.train_inputs, images_of(200))  # still the bytes they were


def test_a_channel_of_one_value_becomes_zero():
    images = torch.full((4, 1, 2, 2), 9, dtype=torch.uint8)
    dataset = make_dataset("x", (images, torch.zeros(4)), (images, torch.zeros(4)), ("a", "b"))
    assert torch.count_nonzero(dataset.normalise(images)) == 0


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            (images_of(4).double(), torch.zeros(4)),
            (images_of(4), torch.zeros(4)),
            r"train inputs are float64 \(4, 3, 8, 8\)",
        ),
        (
            (images_of(4).float(), torch.zeros(4)),
            (images_of(4), torch.zeros(4)),
            "inputs are float32 .* test inputs uint8",
        ),
        ((images_of(4)[0], torch.zeros(4)), (images_of(4), torch.zeros(4)), r"images \(n, C, H, W\) in uint8"),
        ((images_of(4), torch.zeros(3)), (images_of(4), torch.zeros(4)), r"4 train inputs but labels of int64 \(3,\)"),
        (
            (images_of(4), torch.full((4,), 2)),
            (images_of(4), torch.zeros(4)),
            "train labels reach from 2 to 2, but there are 2 classes, 0 to 1",
        ),
        (
            (images_of(4), torch.zeros(4)),
            (images_of(4, side=9), torch.zeros(4)),
            r"uint8 \(4, 3, 8, 8\), test inputs uint8 \(4, 3, 9, 9\)",
        ),
        ((images_of(4), torch.zeros(4)), (images_of(0), torch.zeros(0)), "there are no test samples"),
    ],
)
def test_data_that_do_not_fit_together_are_named(train, test, message):
    with pytest.raises(DataError, match=message):
        make_dataset("x", train, test, ("a", "b"))


@pytest.mark.parametrize("place", [(3, 1), (4096 + 7, 0)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_is_named(place, value):
    good, y = torch.randn(5000, 3), torch.arange(5000) % 2
    bad = good.clone()
    bad[place] = value
    for train, test, part in ((bad, None, ""), (good, (bad, y), "test ")):
        with pytest.raises(DataError, match=f"^x: the {part}input of sample {place[0]} holds NaN or infinity$"):
            make_dataset("x", (train, y), test, ("a", "b"))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (("a",), r"all samples are of one class \(a\); there must be at least two"),
        (("a", "b", "a"), "classes names one class twice: a, b, a"),
    ],
)
def test_classes_that_cannot_be_told_apart_are_refused(classes, words):
    images, labels = images_of(4), torch.zeros(4)
    with pytest.raises(DataError, match=f"^x: {words}$"):
        make_dataset("x", (images, labels), None, classes)
    with pytest.raises(DataError, match=f"^folder: x: {words}$"):
        make_dataset("x", (images, labels), None, classes, "folder")


def test_synthetic_is_the_same_every_time_and_balanced():
    first, again = make_synthetic(), make_synthetic()
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert first.train_inputs.shape == (4000, 1, 28, 28)
    assert torch.bincount(first.train_labels).tolist() == [400] * 10
    assert torch.bincount(first.test_labels).tolist() == [100] * 10


def test_synthetic_can_be_learned():
    toy = make_synthetic()
    train, test = (toy.normalise(x).flatten(1) for x in (toy.train_inputs, toy.test_inputs))
    centres = torch.stack([train[toy.train_labels == c].mean(dim=0) for c in range(10)])
    accuracy = (torch.cdist(test, centres).argmin(dim=1) == toy.test_labels).float().mean()
    assert accuracy > 0.95
