"""Small models with the structure of well-known ones, and with their traps."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    """torchvision's: one in-place ReLU called three times, an in-place addition, a downsample Sequential."""

    def __init__(self, cin: int, width: int, stride: int, downsample: bool) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(cin, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(cin, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if downsample else None
        )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    """ResNet-50's modules with two channels where it has 64."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        cin = width
        for i, blocks in enumerate((3, 4, 6, 3)):
            wide = width * 2**i
            stage = []
            for j in range(blocks):
                stage.append(Bottleneck(cin, wide, 2 if i and not j else 1, downsample=not j))
                cin = 4 * wide
            setattr(self, f"layer{i + 1}", nn.Sequential(*stage))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(cin, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class BasicBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4)
        for i in (1, 2, 3):
            setattr(self, f"layer{i}", nn.Sequential(*(BasicBlock(4) for _ in range(3))))
        self.fc = nn.Linear(4, 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


class Plain(nn.Module):
    """No blocks; its modules are called in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 5)
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.MaxPool2d(2))
        self.flatten = nn.Flatten()

    def forward(self, x):
        return self.head(self.flatten(self.features(x)))


class ModelOutput(OrderedDict):
    """Like transformers': a dict, an attribute for each key, and a tuple when indexed by number."""

    def __getattr__(self, name):
        return self[name]

    def __getitem__(self, key):
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class Layer(nn.Module):
    """A transformer block that returns a tuple, as transformers' blocks do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, padding):
        x = self.norm1(x + self.attention(x, x, x, key_padding_mask=padding)[0])
        return (self.norm2(x + self.mlp(x)), None)


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, x, padding):
        for layer in self.layer:
            x = layer(x, padding)[0]
        return ModelOutput(last_hidden_state=x)


class Bert(nn.Module):
    """Embedding, encoder of three layers, a pooler, and a head that is never used."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(20, width)
        self.encoder = Encoder(width)
        self.pooler = nn.Linear(width, width)
        self.unused = nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask=None):
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.encoder(self.embeddings(input_ids), padding).last_hidden_state
        return ModelOutput(loss=None, pooler_output=self.pooler(hidden[:, 0]), last_hidden_state=hidden)


class Twice(nn.Module):
    """Calls one module two times, and has it under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.again = self.mix
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.mix(torch.relu(self.mix(x))))


class Returns(nn.Module):
    """Returns whatever a function makes of the input; `inner` does, the model passes a tensor on."""

    def __init__(self, make) -> None:
        super().__init__()
        self.inner = Makes(make)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        self.inner(x)
        return self.last(x)


class Makes(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Skips(nn.Module):
    """Keeps its skip connections in a list of its own, and clears that at the end of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4), nn.Linear(4, 3)
        self.skips: list[torch.Tensor] = []

    def forward(self, x):
        self.skips.append(self.down(x))
        self.skips.append(torch.tanh(self.middle(self.skips[0])))
        x = self.last(torch.tanh(self.up(torch.cat(self.skips[:2], 1))))
        self.skips.clear()
        return x
