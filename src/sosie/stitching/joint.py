"""The joint: the layer between two networks, the sums it is fitted from, and how similar its two sides are.

A joint is an affine map of channels. If the sites differ in shape, the activation is resized first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..capture import Batches, Chunk, Site, as_found, count_inputs, cut, join, labels_of, recut, watch
from ..checks import one_of, paired_rows
from ..data import open_data
from ..engine.uncertainty import CONFIDENCE, student
from ..linalg import Affine, JointMoments, lacks_room
from ..linalg.fits import check_fits
from ..measures import Measure, find, snap_to_bounds
from ..process_state import kept_random_state, products
from ..progress import Progress
from ..stats import Alignment, Covariances, Neurons, Scatter, UncentredAlignment, check_labels
from .cuts import CutModel, answer_of

Precision = Literal["float32", "float64"]
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
Resize = Literal["interpolate", "pool"]

CHUNK = 128  # inputs that both networks are run on at a time
HELD = 256 * 2**20  # bytes of activations of both networks that are held at a time
TRIED = 2  # inputs that a cut is tried on: two show whether it leaks
PER_INPUT = 64  # positions from which one product per input is faster; smaller maps are joined into one block


@dataclass(frozen=True)
class Form:
    """The form of one input's activation: a vector, tokens with features, or a map of channels."""

    channels: int
    space: tuple[int, ...] = ()  # height and width of a map, or the number of tokens; empty: a vector
    tokens: bool = False

    @classmethod
    def of(cls, site: Site) -> Form:
        shape = site.shape
        if not shape or 0 in shape:
            raise ValueError(f"an activation of shape {shape} per input cannot be stitched: it has no channels")
        if len(shape) == 1:
            return cls(shape[0])
        if site.channels_last is None:
            raise ValueError(
                f"an activation of shape {shape} per input cannot be stitched, since it is not known which dimension "
                "holds its features: choose another site"
            )
        if site.channels_last:
            return cls(shape[-1], shape[:-1], tokens=True)
        return cls(shape[0], shape[1:])

    def __str__(self) -> str:
        if not self.space:
            return f"a vector of {self.channels}"
        size = " × ".join(map(str, self.space))
        return f"{size} tokens of {self.channels}" if self.tokens else f"a map of {self.channels} channels, {size}"


class Joint(nn.Module):
    """A layer that turns an activation of one network into one of another: shape first, then channels.

    Maps that differ in size are interpolated (bilinear) or pooled (adaptive mean), as `resize` says. Between maps and
    tokens, a grid of tokens is read row by row. One token more than the grid has is a class token: it is dropped when
    tokens become a map, and is the mean of the others when a map becomes tokens. A map or tokens become a vector by
    their mean.
    """

    def __init__(self, source: Form, target: Form, resize: Resize = "interpolate", *, bias: bool = True) -> None:
        super().__init__()
        one_of(resize, "resize", get_args(Resize))
        self.source, self.target, self.resize = source, target, resize
        if self.reshapes and not source.space:
            raise ValueError(f"{source} cannot become {target}: a vector has no positions")
        if self.reshapes and target.space:
            if any(len(form.space) != (1 if form.tokens else 2) for form in (source, target)):
                raise ValueError(f"{source} cannot become {target}: only maps of two dimensions and tokens are resized")
            self._grids = _grid(source), _grid(target)
        self.weight = nn.Parameter(torch.zeros(target.channels, source.channels))
        self.bias = nn.Parameter(torch.zeros(target.channels)) if bias else None

    @property
    def reshapes(self) -> bool:
        """True if the sites differ in more than their channels."""
        return self.source.space != self.target.space or self.source.tokens != self.target.tokens

    def forward(self, activation: Tensor) -> Tensor:
        shaped = self.shaped(activation).to(self.weight.dtype)  # the networks may differ in precision
        if not self.target.space or self.target.tokens:
            return F.linear(shaped, self.weight, self.bias)
        # Contiguous like the output of a network's own layer: some networks continue with `x.view(…)`.
        mapped = torch.einsum("oc,nc...->no...", self.weight, shaped).contiguous()
        return mapped if self.bias is None else mapped + self.bias.view(1, -1, *[1] * len(self.target.space))

    def shaped(self, activation: Tensor) -> Tensor:
        """The activation in the target's shape, still with the source's channels."""
        source, target = self.source, self.target
        if not self.reshapes:
            return activation
        if not target.space:
            return activation.mean(tuple(range(1, activation.ndim - 1) if source.tokens else range(2, activation.ndim)))
        (grid, extra), (size, class_token) = self._grids
        if source.tokens:
            activation = activation[:, extra:].transpose(1, 2).reshape(len(activation), -1, *grid)
        if tuple(activation.shape[2:]) != size and self.resize == "pool":
            activation = F.adaptive_avg_pool2d(activation, (size[0], size[1]))
        elif tuple(activation.shape[2:]) != size:
            activation = F.interpolate(activation, size=size, mode="bilinear", align_corners=False)
        if not target.tokens:
            return activation
        tokens = activation.flatten(2).transpose(1, 2)
        return torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1) if class_token else tokens

    def extra_repr(self) -> str:
        return f"{self.source} → {self.target}, {self.resize}"


def _grid(form: Form) -> tuple[tuple[int, ...], int]:
    """Height and width of the grid, and the number of tokens before it."""
    if not form.tokens:
        return form.space, 0
    count = form.space[0]
    for extra in (0, 1):
        side = math.isqrt(count - extra)
        if side * side == count - extra:
            return (side, side), extra
    raise ValueError(f"{form}: {count} tokens are not a square grid, with or without a class token")


# The sums of paired rows from which joints are fitted

Blocks = Mapping[int, Tensor]  # by site: (parts, features, rows of a part), the same parts at every site
Pair = tuple[int, int]
Key = tuple[str, int]  # ("a", i) is a site of A, ("b", j) one of B

FAR = 1.0  # standard deviations between the provisional centre and a chunk's mean before the chunk is centred anew
LONGEST = 4096  # rows that are added up in the precision of the products; longer sums would lose digits of float32


@dataclass(frozen=True)
class JointSums:
    """Sums over n paired rows of sites of two networks, and over pairs of these sites; all in float64.

    Each site's sums are about a centre of its own, since products of rows far from zero lose digits.
    """

    n: int
    products: torch.dtype  # the precision in which rows were multiplied
    centre: dict[Key, Tensor]  # (p,)
    total: dict[Key, Tensor]  # (p,) Σ x
    square: dict[Key, Tensor]  # (p, p) Σ x xᵀ
    cross: dict[Pair, Tensor]  # (p, q) Σ x yᵀ

    @classmethod
    def of(
        cls,
        a: Blocks,
        b: Blocks,
        pairs: Collection[Pair],
        products: torch.dtype = torch.float32,
        near: JointSums | None = None,
    ) -> JointSums:
        """The sums of one chunk of rows. `near`: sums of earlier chunks, whose precision and suitable centres are used.

        Rows are multiplied in `products` or in their own precision, whichever is finer.
        """
        blocks: dict[Key, Tensor] = {("a", i): block for i, block in a.items()} | {("b", j): b[j] for j in b}
        n = paired_rows(*(block.shape[0] * block.shape[2] for block in blocks.values()))
        if near is not None:
            products = near.products
        else:
            wide = [lacks_room(block, f"site {k}") for (_, k), block in blocks.items()]
            products = torch.float64 if any(wide) else products
        for block in blocks.values():
            products = torch.promote_types(products, block.dtype)
        rows, centre, total, square = {}, {}, {}, {}
        for key, block in blocks.items():
            block = block.to(products)
            for provisional in (None,) if near is None else (near.centre[key], None):
                centre[key] = _mean(block) if provisional is None else provisional
                rows[key] = block - centre[key].to(products)[:, None]
                pieces = [part.sum(2).sum(0, dtype=torch.float64) for part in rows[key].split(LONGEST, 2)]
                total[key], square[key] = torch.stack(pieces).sum(0), block_product(rows[key], rows[key])
                offset = (total[key] / n).square()
                variance = square[key].diagonal() / n - offset
                if not bool(((offset > FAR**2 * variance) & (variance > 0)).any()):
                    break  # otherwise the centre is so far from some mean that products about it lose digits
        cross = {(i, j): block_product(rows["a", i], rows["b", j]) for i, j in pairs}
        return cls(n, products, centre, total, square, cross)

    def merge(self, other: JointSums) -> JointSums:
        """The sums of all rows of both, about this one's centres."""
        shift = {key: centre - other.centre[key] for key, centre in self.centre.items()}
        totals = {key: other.total[key] - other.n * d for key, d in shift.items()}

        def moved(product: Tensor, a: Key, b: Key) -> Tensor:
            """Σ x yᵀ of the other rows, about this one's centres."""
            return product - torch.outer(shift[a], other.total[b]) - torch.outer(totals[a], shift[b])

        total = {key: self.total[key] + totals[key] for key in shift}
        square = {key: self.square[key] + moved(other.square[key], key, key) for key in shift}
        cross = {(i, j): self.cross[i, j] + moved(other.cross[i, j], ("a", i), ("b", j)) for i, j in self.cross}
        return JointSums(self.n + other.n, self.products, self.centre, total, square, cross)

    def joint(self, i: int, j: int) -> JointMoments:
        """Means and covariances of a pair of sites, on the CPU: the input of a fit of A to B."""
        a, b = ("a", i), ("b", j)
        mean_a, mean_b = self.total[a] / self.n, self.total[b] / self.n
        return JointMoments(
            self.n,
            (self.centre[a] + mean_a).cpu(),
            (self.centre[b] + mean_b).cpu(),
            (self.square[a] / self.n - torch.outer(mean_a, mean_a)).cpu(),
            (self.square[b] / self.n - torch.outer(mean_b, mean_b)).cpu(),
            (self.cross[i, j] / self.n - torch.outer(mean_a, mean_b)).cpu(),
            products=self.products,
        )


def block_product(x: Tensor, y: Tensor) -> Tensor:
    """Σ x yᵀ over all rows: one product per part, summed in float64."""
    pieces = zip(x.split(LONGEST, 2), y.split(LONGEST, 2), strict=True)
    products = [torch.bmm(u, v.transpose(1, 2)).sum(0, dtype=torch.float64) for u, v in pieces]
    return products[0] if len(products) == 1 else torch.stack(products).sum(0)


def _mean(block: Tensor) -> Tensor:
    """The mean in float64, rounded to the block's own precision so that it is subtracted exactly."""
    return block.mean((0, 2), dtype=torch.float64).to(block.dtype).double()


# The network made of both, and the data that it is made from


class StitchedNetwork(nn.Module):
    """A network whose lower part is A's and whose upper part is B's, with the joint between them."""

    def __init__(self, lower: CutModel, joint: Joint, upper: CutModel) -> None:
        super().__init__()
        self.lower, self.joint, self.upper = lower, joint, upper
        self.a, self.b = lower.model, upper.model

    def forward(self, batch: Any) -> Tensor:
        """Answer a batch of the data; each network prepares its inputs in its own way."""
        activation, mask = self.lower.representation(batch)
        refuse_padding(self.joint, mask)
        args, kwargs = self.upper.call(batch) if self.upper.cut.needs_input else ((), {})
        return answer_of(self.upper.cut.task(self.joint(activation), *args, **kwargs))


def refuse_padding(joint: Joint, mask: Tensor | None) -> None:
    """Raise if A's tokens are padded (`mask` is False at padding) and the joint would mix them."""
    if mask is not None and joint.reshapes:
        raise ValueError(
            f"A's tokens are padded, and padding would count when {joint.source} become {joint.target}: stitch at "
            "sites with the same tokens, or give inputs of equal length"
        )


def _batches(data: Any) -> Batches:
    return Batches(open_data(data) if isinstance(data, str) else data)


def look_into(data: Any) -> tuple[Any, Iterator[Any]]:
    """The first inputs, at least two if there are as many, and an iterator over all batches, these included."""
    source = _batches(data)
    batches, first = iter(source), list[Any]()
    with kept_random_state():
        while sum(map(count_inputs, first)) < TRIED and (batch := next(batches, None)) is not None:
            first.append(source.kept(batch))
    return join(first), itertools.chain(first, batches)


def chunks_of(data: Any, max_rows: int | None, largest: int = CHUNK) -> Iterator[Chunk]:
    """The data in chunks of at most `largest` inputs."""
    return recut(_batches(data), block=None, max_rows=max_rows, largest=largest)


def read_inputs(data: Any, max_rows: int | None) -> Any:
    """All inputs as one batch, in the structure of the data's batches."""
    with kept_random_state():
        source = _batches(data)
        return join([source.kept(chunk.batch) for chunk in recut(source, block=None, max_rows=max_rows)])


def in_chunks(inputs: Any) -> list[Any]:
    """The inputs in chunks, without a copy."""
    n = count_inputs(inputs)
    return [cut(inputs, start, min(start + CHUNK, n)) for start in range(0, n, CHUNK)]


def chunk_size(*sites: Site) -> int:
    """The number of inputs to run at a time: fewer if the activations at these sites take much memory."""
    return max(1, min(CHUNK, HELD // (4 * sum(math.prod(site.shape) for site in sites))))


def sums_of_pairs(
    models: tuple[CutModel, CutModel],
    sites: tuple[Sequence[Site], Sequence[Site]],
    joints: Mapping[Pair, Joint],
    data: Any,
    precision: Precision,
    max_rows: int | None,
) -> dict[Pair, JointSums]:
    """The sums that fits and measures read, for every pair of sites, from one pass of both networks over the data.

    Every position of an activation is a row; pairs whose rows are the same positions share their sums.
    """
    groups: dict[Any, list[Pair]] = {}
    for pair, joint in joints.items():
        groups.setdefault((joint.target.space, joint.target.tokens), []).append(pair)
    totals: dict[Any, JointSums] = {}
    a, b = models
    with (
        as_found([a.model, b.model]),
        watch(a.model, [site.label for site in sites[0]]) as seen_a,
        watch(b.model, [site.label for site in sites[1]]) as seen_b,
        Progress(f"stitching {a.name} to {b.name}", None, "inputs") as bar,
    ):
        for chunk in chunks_of(data, max_rows, chunk_size(*sites[0], *sites[1])):
            _, at_a, masks_a = a.run(chunk.batch, seen_a, sites[0])
            _, at_b, masks_b = b.run(chunk.batch, seen_b, sites[1])
            for key, pairs in groups.items():
                masks = [_counting(joints[i, j], masks_a[i], masks_b[j]) for i, j in pairs]
                known = [mask for mask in masks if mask is not None]
                keep = functools.reduce(torch.logical_and, known) if known else None
                form, device = joints[pairs[0]].target, at_b[pairs[0][1]].device
                with products():
                    shapers = {i: joints[i, j] for i, j in pairs}
                    x = {i: as_block(joint.shaped(at_a[i]).to(device), form, keep) for i, joint in shapers.items()}
                    y = {j: as_block(at_b[j], form, keep) for _, j in pairs}
                    part = JointSums.of(x, y, pairs, PRECISIONS[precision], near=totals.get(key))
                totals[key] = totals[key].merge(part) if key in totals else part
            bar.advance(chunk.count)
    return {pair: totals[key] for key, pairs in groups.items() for pair in pairs}


def _counting(joint: Joint, mask_a: Tensor | None, mask_b: Tensor | None) -> Tensor | None:
    """The positions at a joint that are padding at neither site, (inputs, tokens); None: all of them."""
    refuse_padding(joint, mask_a)
    if mask_a is None or mask_b is None:
        return mask_a if mask_b is None else mask_b
    if mask_a.shape != mask_b.shape:
        raise ValueError(f"need the same tokens at both sites, got {tuple(mask_a.shape)} and {tuple(mask_b.shape)}")
    return mask_a & mask_b


def as_block(activation: Tensor, form: Form, keep: Tensor | None = None) -> Tensor:
    """(parts, channels, rows of a part), without a copy if the layout allows; `keep`: the positions that count."""
    wide = activation if activation.dtype in (torch.float32, torch.float64) else activation.float()
    if keep is not None:
        rows = (wide if form.tokens else wide.movedim(1, -1)).flatten(0, -2)
        return rows[keep.flatten().nonzero().flatten().to(rows.device)].T[None]
    if form.space and not form.tokens:
        maps = wide.flatten(2)
        return maps if maps.shape[2] >= PER_INPUT else maps.transpose(0, 1).flatten(1)[None]
    return wide.reshape(-1, wide.shape[-1]).T[None]


# Evaluation: the answers of stitched networks against those of A and B and the labels


PROPORTIONS = ("accuracy", "agreement_b", "agreement_a")


@dataclass
class Tally:
    """Sums over inputs that compare the stitched network's answers with those of A and B and the labels."""

    n: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, stitched: Tensor, a: Tensor, b: Tensor, labels: Tensor | None) -> None:
        stitched, a, b = (answer.detach().double().cpu() for answer in (stitched, a, b))
        if stitched.ndim != 2 or b.shape != stitched.shape:
            raise ValueError(f"stitched networks are evaluated on (inputs, classes), got {tuple(stitched.shape)}")
        for answers, name in ((stitched, "the stitched network"), (a, "A"), (b, "B")):
            if bad := int(answers.isnan().flatten(1).any(1).sum()):
                raise ValueError(f"{name} answers {bad} of {len(answers)} inputs with NaN, which agrees with nothing")
        guess, guess_b = stitched.argmax(1), b.argmax(1)
        guess_a = a.argmax(1) if a.shape == stitched.shape else None
        cross_entropy = F.cross_entropy(stitched, b.softmax(1), reduction="none")
        counts = {"cross_entropy": cross_entropy, "cross_entropy²": cross_entropy.square()}
        counts["agreement_b"] = guess == guess_b
        if guess_a is not None:
            counts["agreement_a"] = guess == guess_a
        if labels is not None:
            labels = check_labels(labels.cpu(), "the labels", stitched.shape[1])
            right, right_b = guess == labels, guess_b == labels
            counts |= {"accuracy": right, "accuracy_b": right_b, "both_right": right & right_b}
            if guess_a is not None:
                counts["accuracy_a"] = guess_a == labels
        self.n += len(stitched)
        for key, values in counts.items():
            self.sums[key] = self.sums.get(key, 0.0) + float(values.sum())

    def numbers(self) -> dict[str, float]:
        """Means over inputs, and the accuracy relative to B's (left out if B gets nothing right)."""
        means = {key: value / self.n for key, value in self.sums.items() if key not in ("cross_entropy²", "both_right")}
        if means.get("accuracy_b"):
            means["relative_accuracy"] = means["accuracy"] / means["accuracy_b"]
        return means

    def interval(self, key: str) -> tuple[float, float] | None:
        """The 95 % interval of a number over a sample of inputs; None for an unknown number or a single input.

        Wilson's score interval for proportions; for the others the error of a mean, with Student's t. relative_accuracy
        is a ratio of two means over the same inputs, so its error is that of the mean of s − r b (the delta method).
        """
        value = self.numbers().get(key)
        if value is None or self.n < 2:
            return None
        if key in PROPORTIONS:
            from scipy.stats import binomtest

            low, high = binomtest(round(self.sums[key]), self.n).proportion_ci(CONFIDENCE, "wilson")
            return float(low), float(high)
        if key == "relative_accuracy":
            right, right_b, both = (self.sums[name] for name in ("accuracy", "accuracy_b", "both_right"))
            squares, share = right - 2 * value * both + value**2 * right_b, right_b / self.n
        else:
            squares, share = self.sums["cross_entropy²"] - self.n * value**2, 1.0
        error = math.sqrt(max(squares, 0.0) / (self.n * (self.n - 1))) / share  # squares < 0 by rounding
        reach = float(student(self.n - 1, CONFIDENCE)) * error
        return max(value - reach, 0.0), value + reach


def evaluate_joints(
    a: CutModel,
    sites_a: Sequence[Site],
    joints: Mapping[Pair, Joint],
    uppers: Sequence[CutModel],
    data: Any,
    max_rows: int | None,
) -> dict[Pair, Tally]:
    """Evaluate each stitched network. A and B run once, and for each joint only the part of B above it.

    `uppers`: B, cut at each of its sites.
    """
    b, cuts = uppers[0], [upper.cut for upper in uppers]
    tallies = {pair: Tally() for pair in joints}
    many = f"{len(joints)} stitched networks" if len(joints) > 1 else "the stitched network"
    with (
        as_found([a.model, b.model]),
        watch(a.model, [site.label for site in sites_a]) as seen,
        Progress(f"evaluating {many}", None, "inputs") as bar,
    ):
        for chunk in chunks_of(data, max_rows, chunk_size(*sites_a, *(cut.site for cut in cuts))):
            output, activations, masks = a.run(chunk.batch, seen, sites_a)
            answer_a, answer_b, labels = answer_of(output), b.answer(chunk.batch), labels_of(chunk.batch)
            call = b.call(chunk.batch) if any(cut.needs_input for cut in cuts) else ((), {})
            for (i, j), tally in tallies.items():
                joint, cut = joints[i, j], cuts[j]
                refuse_padding(joint, masks[i])
                args, kwargs = call if cut.needs_input else ((), {})
                output = cut.task(joint(activations[i].to(joint.weight)), *args, **kwargs)
                tally.add(answer_of(output), answer_a, answer_b, labels)
            bar.advance(chunk.count)
    return tallies


# Similarity of B and an affine map of A at the joint of a stitched network, from moments


def similarity_at_joint(
    moments: JointMoments, affine: Affine, measures: Iterable[str | Measure], *, of_b: Scatter | None = None
) -> dict[str, float]:
    """The values of measures between S(A) and B; measures may read covariances, neurons or alignments.

    A measure that is invariant to S says nothing about it: CKA ignores rotations, mean_cca and regression_r2 any
    invertible map, so regression_r2 of a least squares map is that of A itself; `explained` does depend on the map.
    `of_b`: B's covariance with its factorisations, to compare many maps with one B.
    """
    check_fits(moments, affine)
    weight, bias = affine.weight.to(moments.cov_aa), affine.bias.to(moments.cov_aa)
    cov = weight @ moments.cov_aa @ weight.T
    if not bool((cov.diagonal() > 0).any()):
        raise ValueError("the map sends all of A to a single point, so there is nothing to compare with B")
    mean, cov, cov_ab = weight @ moments.mean_a + bias, (cov + cov.T) / 2, weight @ moments.cov_ab
    return similarities(replace(moments, mean_a=mean, cov_aa=cov, cov_ab=cov_ab), map(find, measures), of_b)


def similarities(m: JointMoments, measures: Iterable[Measure], of_b: Scatter | None = None) -> dict[str, float]:
    """The values of measures between A and B."""
    both = Covariances(scatter(m, "a"), of_b or scatter(m, "b"), m.cov_ab)
    values = {}
    for measure in measures:
        if measure.reads in (Alignment, UncentredAlignment):
            # ⟨K, L⟩ = ‖Σ x yᵀ‖²; n² cancels in every measure, and is there because the view is defined with it.
            seconds = m.about("mean" if measure.reads is Alignment else "zero")
            value = measure(measure.reads(*((m.n * second).square().sum() for second in seconds)))
        elif measure.reads is Covariances:
            value = measure(both)
        elif measure.reads is Neurons:
            measure.check_widths(*m.widths)
            value = measure(Neurons(m.cov_aa.diagonal(), m.cov_bb.diagonal(), m.cov_ab))
        else:
            raise ValueError(
                f"{measure.name} reads {measure.reads.__name__}, which means and covariances do not supply: compare "
                "the mapped rows instead"
            )
        values[measure.name] = float(snap_to_bounds(value, measure, m.products))
    return values


def scatter(m: JointMoments, side: Literal["a", "b"]) -> Scatter:
    """The covariance of one side, with a tolerance that fits the precision of its products."""
    return Scatter(m.cov_aa if side == "a" else m.cov_bb, m.n, tolerance=m.tolerance)
