import pytest
import torch
from stand_ins import Bert, Encoder, Plain, ResNet20, ResNet50, Twice
from torch import nn

from sosie.capture import SilentSite, SiteError, select, watch


def labels(model, *inputs, sites=None, **kwargs):
    model.eval()
    with torch.no_grad(), watch(model, sites, sink=lambda site, x: None) as seen:
        seen.run(*inputs, **kwargs)
    return [site.label for site in seen.sites]


class Twins(nn.Module):
    """One block with two perceptrons in it, which are not the blocks of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.block = TwinBlock()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.block(self.stem(x)))


class TwinBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.mix = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.second = Perceptron(), Perceptron()

    def forward(self, x):
        return self.second(self.first(self.mix(self.gate(self.norm(x)))))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def test_resnet50_gives_its_16_bottlenecks():
    found = labels(ResNet50(), torch.randn(2, 3, 32, 32))
    assert found == [f"layer{i}.{j}" for i, n in ((1, 3), (2, 4), (3, 6), (4, 3)) for j in range(n)]


def test_resnet50_has_126_leaves_that_fire_158_times():
    model = ResNet50()
    assert len(select(model, "leaves")) == 126
    assert len(labels(model, torch.randn(2, 3, 32, 32), sites="leaves")) == 158


def test_resnet20_gives_its_9_blocks():
    assert labels(ResNet20(), torch.randn(2, 3, 8, 8)) == [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(3)]


def test_plain_net_gives_its_layers_in_execution_order_without_those_that_change_nothing():
    found = labels(Plain(), torch.randn(2, 3, 8, 8))
    assert found == ["features.0", "features.1", "features.3", "head"]


def test_transformer_gives_its_blocks_although_they_lie_in_one_encoder():
    assert labels(Bert(), torch.ones(2, 5, dtype=torch.long)) == [f"encoder.layer.{i}" for i in range(3)]


def test_torchs_encoder_layers_are_blocks():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    assert labels(model, torch.randn(2, 5, 8)) == ["layers.0", "layers.1"]


class Dense(nn.ModuleDict):
    """torchvision's DenseNet block: a ModuleDict that can be called."""

    def __init__(self) -> None:
        super().__init__({f"layer{i}": Perceptron() for i in (1, 2)})

    def forward(self, x):
        for layer in self.values():
            x = layer(x)
        return x


class Transition(nn.Sequential):
    pass


class Holder(nn.Module):
    """Holds modules and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Perceptron(), Perceptron()


class HeldNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Holder(), Holder()

    def forward(self, x):
        return self.two.b(self.two.a(self.one.b(self.one.a(x))))


def test_containers_that_compute_are_blocks_and_modules_that_only_hold_others_are_not():
    change = [Transition(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    dense = nn.Sequential(nn.Linear(4, 4), Dense(), change[0], Dense(), change[1], nn.Linear(4, 2))
    assert labels(dense, torch.randn(3, 4)) == ["1", "2", "3", "4"]
    assert labels(HeldNet(), torch.randn(3, 4)) == ["one.a", "one.b", "two.a", "two.b"]


def test_twins_inside_one_block_are_not_the_models_blocks():
    assert labels(Twins(), torch.randn(3, 4))[:2] == ["stem", "block.norm"]
    with pytest.raises(SiteError, match="leaves"):
        select(Twins(), "blocks")


def test_attention_counts_as_a_leaf_and_its_projection_does_not():
    leaves = select(Bert(), "leaves")
    assert "encoder.layer.0.attention" in leaves
    assert "encoder.layer.0.attention.out_proj" not in leaves


def test_a_weight_parametrization_is_no_site():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU())
    assert labels(model, torch.randn(2, 4), sites="leaves") == ["0", "1"]


def test_a_model_without_parts_is_its_own_site():
    assert labels(nn.Linear(4, 3), torch.randn(2, 4)) == ["output"]
    assert labels(nn.Flatten(), torch.randn(2, 4)) == ["output"]


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ("fc", ["fc"]),
        (["fc", "layer1.0"], ["layer1.0", "fc"]),
        ("layer?", ["layer1", "layer2", "layer3"]),
        ("layer1.*.conv*", [f"layer1.{i}.conv{j}" for i in range(3) for j in (1, 2)]),
        (nn.Linear, ["fc"]),
        (["bn1", nn.Linear], ["bn1", "fc"]),
        ("blocks", [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(3)]),
        (".", ["output"]),
        ("", ["output"]),
        ("output", ["output"]),
    ],
)
def test_selectors(sites, expected):
    assert labels(ResNet20(), torch.randn(2, 3, 8, 8), sites=sites) == expected


def test_a_module_of_the_model_is_a_selector_and_of_another_is_not():
    model = ResNet20()
    assert list(select(model, model.layer2[1])) == ["layer2.1"]
    with pytest.raises(SiteError, match="Linear is not a part"):
        select(model, nn.Linear(2, 2))


def test_an_exact_name_wins_over_a_glob_and_a_word():
    model = nn.Module()
    model.add_module("a*", nn.Linear(2, 2))
    model.add_module("ab", nn.Linear(2, 2))
    model.add_module("leaves", nn.Linear(2, 2))
    assert list(select(model, "a*")) == ["a*"]
    assert list(select(model, "a?")) == ["a*", "ab"]
    assert list(select(model, "leaves")) == ["leaves"]


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ("mix", ["mix", "mix@2"]),
        ("mix@2", ["mix@2"]),
        ("mix@1", ["mix"]),
        (["mix@2", "mix"], ["mix", "mix@2"]),
        ("again@2", ["mix@2"]),
        ("again", ["mix", "mix@2"]),
        ("aga*", ["mix", "mix@2"]),
        ("m*@2", ["mix@2"]),
        ("leaves", ["mix", "mix@2", "out"]),
    ],
)
def test_calls_and_aliases(sites, expected):
    assert labels(Twice(), torch.randn(3, 4), sites=sites) == expected


@pytest.mark.parametrize(
    ("sites", "says"),
    [
        ("layer1.0.cnv1", "did you mean 'layer1.0.conv1'"),
        ("fcc", "did you mean 'fc'"),
        ("conv2", "'layer1.0.conv2'"),
        ("nothing*", "no module is called 'nothing\\*'"),
        ("zzzzzz", "there are conv1, bn1"),
        (nn.LSTM, "no module of type LSTM; there are BasicBlock"),
        ([], "list of sites is empty"),
        (3.5, "iterable|3.5"),
        ([3.5], "got 3.5"),
        ("fc@0", "counted from 1"),
    ],
)
def test_unknown_sites_are_refused_in_words(sites, says):
    with pytest.raises((SiteError, TypeError), match=says):
        select(ResNet20(), sites)


def test_an_exactly_named_module_that_is_never_called_is_an_error_and_a_broad_one_is_left_out():
    ids = torch.ones(2, 5, dtype=torch.long)
    named = ["unused", "encoder.layer.0.attention.out_proj", "pooler"]
    with pytest.raises(SilentSite, match=r"'encoder.layer.0.attention.out_proj'.*never called.*'unused'"):
        labels(Bert(), ids, sites=named)
    model = Bert().eval()
    with torch.no_grad(), watch(model, nn.Linear) as seen:
        model(ids)
    assert "pooler" in seen
    assert "unused" not in seen
    assert seen.left_out["unused"] == "was never called"
    assert "encoder.layer.0.attention.out_proj" in seen.left_out


def test_nothing_but_silent_sites_is_an_error():
    with pytest.raises(SilentSite, match="'unused' was never called"):
        labels(Bert(), torch.ones(2, 5, dtype=torch.long), sites="un*")


def test_a_call_that_does_not_happen_is_an_error():
    with pytest.raises(SilentSite, match=r"'mix@3' \(Linear, called 2 times\)"):
        labels(Twice(), torch.randn(3, 4), sites="mix@3")


def test_the_models_output_has_another_label_where_a_module_is_called_output():
    model = nn.Sequential()
    model.add_module("output", nn.Linear(3, 2))
    assert labels(model, torch.randn(2, 3), sites=["output", "."]) == ["output", "."]


def test_the_layers_of_two_stacks_are_the_blocks_and_not_the_stacks():
    """T5's encoder and decoder are one class; blocks that merely hold a list stay what they are."""

    class Stack(Encoder):
        pass

    halves = nn.ModuleDict({"encoder": Stack(8), "decoder": Stack(8)})
    assert list(select(halves)) == [f"{half}.layer.{i}" for half in ("encoder", "decoder") for i in range(3)]
    numbered = nn.Sequential(Stack(8), Stack(8))
    assert list(select(numbered)) == ["0", "1"]
