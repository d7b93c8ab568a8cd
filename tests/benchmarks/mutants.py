"""Break the mathematics of the package in about two hundred places and check that a unit test notices each.

    python tests/benchmarks/mutants.py [--list] [--only NAME] [--jobs 2]

Every mutant changes one passage, which must occur exactly once in its module, in a copy of the package, and runs the
tests mapped to it. Survivors are printed, and the exit code is then 1.
"""

# ruff: noqa: E501
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
PACKAGE, UNIT = Path("cdc_plugin"), Path("tests/unit")
SECONDS = 180  # an endless loop counts as noticed
SURVIVED, NOTICED, INVALID = "survived", "noticed", "invalid"


@dataclass(frozen=True)
class Mutant:
    """One change of ``old`` to ``new`` in a module, and the tests (below tests/unit) that must notice it."""

    name: str
    module: str
    old: str
    new: str
    tests: str

    def mutate(self, text: str) -> str:
        """Return the text of the module with the change."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in {self.module}, expected once")
        return text.replace(self.old, self.new)


# fmt: off
KMEANS = "core/test_kmeans.py"
TRAINING, COLLAPSE, QUALITY = "training/test_mathematics.py", "training/test_collapse.py", "evaluation/test_quality.py"
REVIEW = "training/test_review.py"
MUTANTS = [
    # k-means
    Mutant("one iteration only", "core/kmeans.py", "assignment, distance = nearest(points, centers)\n    for _ in range(iterations):", "assignment, distance = nearest(points, centers)\n    for _ in range(1):", KMEANS),
    Mutant("mini-clusters after one iteration", "core/targets.py", "generator, iterations=20)", "generator, iterations=1)", "core/test_targets.py"),
    Mutant("prototypes after one iteration", "core/prototypes.py", "min(hidden, len(features)), generator, iterations=20)", "min(hidden, len(features)), generator, iterations=1)", "core/test_prototypes.py"),
    Mutant("consensus after one iteration", "core/prototypes.py", "count, generator, iterations=20)", "count, generator, iterations=1)", "core/test_prototypes.py"),
    Mutant("no move is too small", "core/kmeans.py", "if shift <= small or torch.equal(assignment, previous):", "if shift <= 1e9 or torch.equal(assignment, previous):", KMEANS),
    Mutant("empty cluster moves to 0", "core/kmeans.py", "torch.where(sizes > 0, sums / sizes.clamp(min=1), centers)", "torch.where(sizes >= 0, sums / sizes.clamp(min=1), centers)", KMEANS),
    Mutant("worst of the starts", "core/kmeans.py", "best = min(runs, key=lambda run: run.inertia)", "best = max(runs, key=lambda run: run.inertia)", KMEANS),
    Mutant("centres stay shifted", "core/kmeans.py", "Partition(best.centers + shift,", "Partition(best.centers,", KMEANS),
    Mutant("points are not centred", "core/kmeans.py", "centred = points - shift", "centred = points", KMEANS),
    Mutant("farthest centre", "core/kmeans.py", "alpha=-1).min(dim=1)", "alpha=-1).max(dim=1)", KMEANS),
    Mutant("norms not halved", "core/kmeans.py", "half_norms = centers.square().sum(dim=1) / 2", "half_norms = centers.square().sum(dim=1)", KMEANS),
    Mutant("distances without norms", "core/kmeans.py", "(points.square().sum(dim=1) + 2 * score)", "(2 * score)", KMEANS),
    Mutant("worst candidate", "core/kmeans.py", "best = improved.sum(dim=1).argmin()", "best = improved.sum(dim=1).argmax()", KMEANS),
    Mutant("candidates without mass", "core/kmeans.py", "draws[step] * mass[-1], right=True)", "draws[step] * 0, right=True)", KMEANS),
    Mutant("closest not updated", "core/kmeans.py", "closest = improved[best]", "closest = distance[best]", KMEANS),
    Mutant("sample of eight points", "core/kmeans.py", "limit = max(8 * clusters, 2048)", "limit = 8", KMEANS),
    Mutant("inertia is a mean", "core/kmeans.py", "Partition(centers, assignment, distance.sum().item())", "Partition(centers, assignment, distance.mean().item())", KMEANS),
    Mutant("blocks: one iteration only", "core/kmeans.py", "for _ in range(iterations):\n        # Sizes", "for _ in range(1):\n        # Sizes", KMEANS),
    Mutant("blocks: not summed over processes", "core/kmeans.py", "        total(sums)\n", "", KMEANS),
    Mutant("blocks: variance about 0", "core/kmeans.py", "(sums[:, width + 1].sum() / count - mean.square().sum()) / width", "(sums[:, width + 1].sum() / count) / width", KMEANS),
    Mutant("blocks: empty cluster moves to 0", "core/kmeans.py", "torch.where(sizes > 0, sums[:, :width]", "torch.where(sizes >= 0, sums[:, :width]", KMEANS),
    # Selection (Eq. 4)
    Mutant("quota rounds up", "core/selection/__init__.py", "quota = mass.floor().long()", "quota = mass.ceil().long()", "core/selection/test_selection.py"),
    Mutant("one too many trusted", "core/selection/__init__.py", "top[rank < quota]", "top[rank <= quota]", "core/selection/test_selection.py"),
    Mutant("everything in the lists is trusted", "core/selection/__init__.py", "mask[top[rank < quota]] = True", "mask[top] = True", "core/selection/test_selection.py"),
    Mutant("mass of the column in place of the confidence", "core/selection/__init__.py", "confidence[top].sum(dim=0)", "probs.gather(0, top).sum(dim=0)", "core/selection/test_selection.py"),
    Mutant("least probable samples", "core/selection/__init__.py", "best = probs.topk(batch // clusters, dim=0)", "best = probs.topk(batch // clusters, dim=0, largest=False)", "core/selection/test_selection.py"),
    Mutant("lists of 2 B / C", "core/selection/__init__.py", "stable=True).indices[: batch // clusters]", "stable=True).indices[: 2 * batch // clusters]", "core/selection/test_selection.py"),
    Mutant("column's labels", "core/selection/__init__.py", "labels = probs.argmax(dim=1)", "labels = probs.argmin(dim=1)", "core/selection/test_selection.py"),
    Mutant("threshold must be exceeded", "core/selection/thresholds.py", "confidence >= required[labels]", "confidence > required[labels]", "core/selection/test_thresholds.py"),
    Mutant("FlexMatch's mapping is linear", "core/selection/thresholds.py", "threshold * status / (2 - status)", "threshold * status", "core/selection/test_thresholds.py"),
    Mutant("FlexMatch without warm-up", "core/selection/thresholds.py", "counts[1:] / counts.max()", "counts[1:] / counts[1:].max()", "core/selection/test_thresholds.py"),
    Mutant("FlexMatch remembers all labels", "core/selection/thresholds.py", "sure = select_above(probs, threshold)", "sure = select_above(probs, 0.0)", "core/selection/test_thresholds.py"),
    Mutant("momentum turned round", "core/selection/thresholds.py", "momentum * past + (1 - momentum) * present", "(1 - momentum) * past + momentum * present", "core/selection/test_thresholds.py"),
    Mutant("FreeMatch by the smallest cluster", "core/selection/thresholds.py", "shares / shares.max() * level", "shares / shares.min() * level", "core/selection/test_thresholds.py"),
    Mutant("add-ons admit the unsure", "core/selection/addons.py", "values > MODERATE)", "values < MODERATE)", "core/selection/test_addons.py"),
    Mutant("nearest in place of farthest trusted", "core/selection/addons.py", 'similarity[trusted], "amin")', 'similarity[trusted], "amax")', "core/selection/test_addons.py"),
    Mutant("gradients without inputs", "core/selection/addons.py", "(residuals @ residuals[trusted].T) * (inputs @ inputs[trusted].T)", "(residuals @ residuals[trusted].T)", "core/selection/test_addons.py"),
    Mutant("add-ons must all admit", "core/selection/addons.py", "for add in self.added]).any(dim=0)", "for add in self.added]).all(dim=0)", "core/selection/test_addons.py"),
    Mutant("an add-on drops what was trusted", "core/selection/addons.py", "selection.mask | more,", "more,", "core/selection/test_addons.py"),
    # Targets (Sec. 3.1)
    Mutant("sums in place of means", "core/targets.py", "(sums / sizes.unsqueeze(1))[assignment]", "sums[assignment]", "core/test_targets.py"),
    Mutant("targets are the predictions", "core/targets.py", "(sums / sizes.unsqueeze(1))[assignment]", "probs", "core/test_targets.py"),
    Mutant("limits of sizes swapped", "core/targets.py", "min(largest, max(3.0, 800 * (1 - confidence) ** 2))", "max(largest, min(3.0, 800 * (1 - confidence) ** 2))", "core/test_targets.py"),
    Mutant("size is linear", "core/targets.py", "800 * (1 - confidence) ** 2", "800 * (1 - confidence)", "core/test_targets.py"),
    Mutant("surer means larger", "core/targets.py", "800 * (1 - confidence) ** 2", "800 * confidence ** 2", "core/test_targets.py"),
    Mutant("fewer mini-clusters than clusters", "core/targets.py", "2 * clusters), batch)", "1), batch)", "core/test_targets.py"),
    Mutant("more mini-clusters than samples", "core/targets.py", "min(max(round(batch / size), 2 * clusters), batch)", "max(round(batch / size), 2 * clusters)", "core/test_targets.py"),
    Mutant("lengths count in mini-clusters", "core/targets.py", "kmeans(F.normalize(features, dim=1), mini", "kmeans(features, mini", "core/test_targets.py"),
    Mutant("hard targets are soft", "core/targets.py", "F.one_hot(probs.argmax(dim=1), probs.shape[1]).to(probs.dtype)", "probs", "core/test_targets.py"),
    # Losses (Eqs. 1-3 and 5)
    Mutant("untrusted samples count", "core/losses.py", "(losses * mask).sum()", "losses.sum()", "core/test_losses.py"),
    Mutant("mean over all samples", "core/losses.py", "mask.sum().clamp(min=1)", "len(mask)", "core/test_losses.py"),
    Mutant("nothing trusted gives NaN", "core/losses.py", "mask.sum().clamp(min=1)", "mask.sum()", "core/test_losses.py"),
    Mutant("positive entropy", "core/losses.py", "return (log_mean.exp() * log_mean).sum()", "return -(log_mean.exp() * log_mean).sum()", "core/test_losses.py"),
    Mutant("entropy of each sample", "core/losses.py", "log_mean = F.log_softmax(logits, dim=1).logsumexp(dim=0) - math.log(len(logits))", "log_mean = F.log_softmax(logits, dim=1) / len(logits)", "core/test_losses.py"),
    Mutant("entropy of the sum", "core/losses.py", "logsumexp(dim=0) - math.log(len(logits))", "logsumexp(dim=0)", "core/test_losses.py"),
    Mutant("weight of the entropy ignored", "core/losses.py", "entropy_weight * spread", "spread", "core/test_losses.py"),
    Mutant("another calibration ignored", "core/losses.py", "return fit(logits, targets) +", "return soft_target_loss(logits, targets) +", "core/test_losses.py"),
    Mutant("smoothing not divided by C", "core/losses.py", "strength / targets.shape[1]", "strength", "core/test_losses.py"),
    Mutant("focal power of p", "core/losses.py", "missing**strength * log_probs", "log_probs.exp()**strength * log_probs", "core/test_losses.py"),
    Mutant("L2 in place of L1", "core/losses.py", "logits.abs().sum(dim=1).mean()", "logits.square().sum(dim=1).mean()", "core/test_losses.py"),
    Mutant("upper limit of the strength", "core/losses.py", "not 0 <= strength <= calibration.strongest", "not 0 <= strength", "core/test_losses.py"),
    # Prototypes (Sec. 3.3)
    Mutant("scale dropped", "core/prototypes.py", "second * fit_scale(logits, targets)", "second", "core/test_prototypes.py"),
    Mutant("second layer not centred", "core/prototypes.py", "orthogonalize(means - means.mean(dim=0))", "orthogonalize(means)", "core/test_prototypes.py"),
    Mutant("second layer not orthogonalised", "core/prototypes.py", "second = orthogonalize(means - means.mean(dim=0))", "second = means - means.mean(dim=0)", "core/test_prototypes.py"),
    Mutant("first layer not orthogonalised", "core/prototypes.py", "first = orthogonalize(prototypes.repeat(repeats, 1)[:hidden])", "first = prototypes.repeat(repeats, 1)[:hidden]", "core/test_prototypes.py"),
    Mutant("refined centres ignored", "core/prototypes.py", "runs[0] = Partition(centers, assignment, distance.sum().item())", "pass", "core/test_prototypes.py"),
    Mutant("refined centres not assigned to", "core/prototypes.py", "assignment, distance = nearest(directions, centers)", "assignment, distance = runs[0].assignment, torch.zeros(1)", "core/test_prototypes.py"),
    Mutant("worst k-means run", "core/prototypes.py", "key=lambda r: r.inertia)", "key=lambda r: -r.inertia)", "core/test_prototypes.py"),
    Mutant("rows not centred", "core/prototypes.py", "centred = features - features.mean(dim=1, keepdim=True)", "centred = features", "core/test_prototypes.py"),
    Mutant("singular directions kept", "core/prototypes.py", "((left * spanned) @ right)", "(left @ right)", "core/test_prototypes.py"),
    Mutant("no ReLU", "core/prototypes.py", ".sqrt()).relu_()", ".sqrt())", "core/test_prototypes.py"),
    Mutant("votes of one run", "core/prototypes.py", "for run in runs]", "for run in runs[:1]]", "core/test_prototypes.py"),
    Mutant("votes not smoothed", "core/prototypes.py", "return mini_cluster_targets(torch.stack(votes).mean(dim=0), neighbours, count)", "return torch.stack(votes).mean(dim=0)", "core/test_prototypes.py"),
    Mutant("bisection turned round", "core/prototypes.py", "if slope > 0 else (middle, high)", "if slope < 0 else (middle, high)", "core/test_prototypes.py"),
    Mutant("means of raw activations", "core/prototypes.py", "sums.index_add_(0, places, standardize_rows(part))", "sums.index_add_(0, places, part)", "core/test_prototypes.py"),
    # Outliers, agreement, random streams
    Mutant("limit from one half", "core/mahalanobis.py", "for fitted in (half, ~half)", "for fitted in (half,)", "core/test_mahalanobis.py"),
    Mutant("limit on the fitted images", "core/mahalanobis.py", ".distance(features[~fitted])", ".distance(features[fitted])", "core/test_mahalanobis.py"),
    Mutant("limit at the median", "core/mahalanobis.py", "int((1 - FALSE_ALARMS) * len(distances))", "int(0.5 * len(distances))", "core/test_mahalanobis.py"),
    Mutant("farthest centre of all", "core/mahalanobis.py", "torch.cat(parts).min(dim=1).values", "torch.cat(parts).max(dim=1).values", "core/test_mahalanobis.py"),
    Mutant("scatter about 0", "core/mahalanobis.py", "residuals = unit - means[assignment]", "residuals = unit", "core/test_mahalanobis.py"),
    Mutant("distance depends on length", "core/mahalanobis.py", "F.normalize(part, dim=1) @ whitening", "part @ whitening", "core/test_mahalanobis.py"),
    Mutant("empty clusters are centres", "core/mahalanobis.py", "means[count > 0] @ whitening, whitening", "means @ whitening, whitening", "core/test_mahalanobis.py"),
    Mutant("agreement without matching", "core/agreement.py", "counts[rows, columns].sum().item()", "counts.diagonal().sum().item()", "core/test_agreement.py"),
    Mutant("worst matching", "core/agreement.py", "linear_sum_assignment(counts.numpy(), maximize=True)", "linear_sum_assignment(counts.numpy())", "core/test_agreement.py"),
    Mutant("own neighbour", "core/agreement.py", "rows] = -2.0", "rows] = 2.0", "core/test_agreement.py"),
    Mutant("separation without spreads", "core/agreement.py", "(one.std() + two.std()).clamp_min(1e-9)", "1.0", "core/test_agreement.py"),
    Mutant("a stream ignores what it is for", "core/random_streams.py", "for part in parts:", "for part in parts[:1]:", "core/test_random_streams.py"),
    Mutant("a stream ignores the seed", "core/random_streams.py", "for part in parts:", "for part in parts[1:]:", "core/test_random_streams.py"),
    Mutant("a stream ignores the epoch", "core/random_streams.py", "for part in parts:", "for part in parts[:2]:", "core/test_random_streams.py"),
    Mutant("processes share dropout", "core/random_streams.py", "generator=randomness)) + process)", "generator=randomness)))", "core/test_random_streams.py"),
    Mutant("the global stream is not restored", "core/random_streams.py", "with torch.random.fork_rng(devices=devices):", "with contextlib.nullcontext():", "core/test_random_streams.py"),
    # Initial heads (Sec. 3.3)
    Mutant("old head's negative half dropped", "models/initialise.py", "torch.cat([identity, -identity], dim=1)", "torch.cat([identity, identity], dim=1)", "models/test_initialise.py"),
    Mutant("BatchNorm does not restore the mean", "models/initialise.py", "(variance + BATCHNORM_EPSILON).sqrt(), mean", "(variance + BATCHNORM_EPSILON).sqrt(), 0 * mean", "models/test_initialise.py"),
    Mutant("old heads swapped", "models/initialise.py", "for head in (heads[0], heads[-1])", "for head in (heads[-1], heads[0])", "models/test_initialise.py"),
    Mutant("worst match of numbers", "models/initialise.py", "linear_sum_assignment(counts, maximize=True)", "linear_sum_assignment(counts)", "models/test_initialise.py"),
    Mutant("old numbers ignored", "models/initialise.py", "if old_probs is not None:", "if False:", "models/test_initialise.py"),
    Mutant("an old head of another size is kept", "config/resolve.py", '"keep" if sizes == {clusters} else', '"keep" if sizes else', "config/test_resolve.py"),
    Mutant("cosine of raw centres", "models/heads.py", "F.normalize(self.centers, dim=1).T", "self.centers.T", "models/test_initialise.py"),
    Mutant("temperature ignored", "models/heads.py", ".T / self.temperature", ".T", "models/test_initialise.py"),
    # Training (Algorithm 1)
    Mutant("every target comes from the clustering head", "training/steps.py", "self.target_head = self.calibration_head if settings.heads == \"dual\" else self.clustering_head", "self.target_head = self.clustering_head", TRAINING),
    Mutant("the clustering head selects pseudo-labels: hidden units", "training/refiner.py", "networks.target_head.hidden(weak_features)", "networks.clustering_head.hidden(weak_features)", TRAINING),
    Mutant("the clustering head selects pseudo-labels: logits", "training/refiner.py", "networks.target_head.logits(hidden)", "networks.clustering_head.logits(hidden)", TRAINING),
    Mutant("plain views select pseudo-labels", "training/refiner.py", "if views.weak is not views.plain:", "if False:", TRAINING),
    Mutant("the calibration head gives its own targets", "training/refiner.py", "probs = F.softmax(networks.clustering_head(features), dim=1)", "probs = F.softmax(networks.calibration_head(features), dim=1)", TRAINING),
    Mutant("mini-clusters of probabilities", "training/refiner.py", "find_mini_clusters(features, count, randomness)", "find_mini_clusters(probs, count, randomness)", TRAINING),
    Mutant("limits of mini-clusters swapped by freezing", "training/refiner.py", "LARGEST_FROZEN if self.settings.freeze_backbone else LARGEST_MINI_CLUSTER", "LARGEST_MINI_CLUSTER if self.settings.freeze_backbone else LARGEST_FROZEN", TRAINING),
    Mutant("later sub-batches learn the first one's targets", "training/steps.py", "targets.features[sub_batch.rows], targets.soft[sub_batch.rows])", "targets.features[sub_batch.rows], targets.soft[: sub_batch.rows.stop - sub_batch.rows.start])", TRAINING),
    Mutant("later sub-batches learn from the first one's features", "training/steps.py", "targets.features[sub_batch.rows], targets.soft[sub_batch.rows])", "targets.features[: sub_batch.rows.stop - sub_batch.rows.start], targets.soft[sub_batch.rows])", TRAINING),
    Mutant("later sub-batches learn the first one's labels", "training/steps.py", "selection.labels[sub_batch.trained], selection.mask[sub_batch.trained]", "selection.labels[: len(sub_batch.trained)], selection.mask[sub_batch.trained]", TRAINING),
    Mutant("later sub-batches trust what the first one trusts", "training/steps.py", "selection.labels[sub_batch.trained], selection.mask[sub_batch.trained]", "selection.labels[sub_batch.trained], selection.mask[: len(sub_batch.trained)]", TRAINING),
    Mutant("weak views are trained on", "training/steps.py", "pixels = views.strong_of(sub_batch.own)", "pixels = views.weak[sub_batch.own]", TRAINING),
    Mutant("the backbone at the rate of the heads", "training/steps.py", "\"full_lr\": settings.lr_backbone", "\"full_lr\": settings.lr_heads", TRAINING),
    Mutant("the schedule is ignored", "training/steps.py", "group[\"lr\"] = group[\"full_lr\"] * factor", "group[\"lr\"] = group[\"full_lr\"]", TRAINING),
    Mutant("the weight of the entropy is 1", "training/steps.py", "logits, targets, settings.entropy_weight,", "logits, targets, 1.0,", TRAINING),
    Mutant("training ignores the seed", "training/refiner.py", "generator(self.settings.seed, TRAINING, self.epoch)", "generator(0, TRAINING, self.epoch)", TRAINING),
    Mutant("training ignores the epoch", "training/refiner.py", "generator(self.settings.seed, TRAINING, self.epoch)", "generator(self.settings.seed, TRAINING, 0)", TRAINING),
    Mutant("the order ignores the seed", "training/batches.py", "generator(seed, ORDER, epoch)", "generator(0, ORDER, epoch)", TRAINING),
    Mutant("the order ignores the epoch", "training/batches.py", "generator(seed, ORDER, epoch)", "generator(seed, ORDER, 0)", TRAINING),
    Mutant("views ignore the seed", "training/batches.py", "generator(seed, VIEWS, epoch, number)", "generator(0, VIEWS, epoch, number)", TRAINING),
    Mutant("views ignore the epoch", "training/batches.py", "generator(seed, VIEWS, epoch, number)", "generator(seed, VIEWS, 0, number)", TRAINING),
    Mutant("views ignore the number of the batch", "training/batches.py", "generator(seed, VIEWS, epoch, number)", "generator(seed, VIEWS, epoch, 0)", TRAINING),
    # Rounds (settled, stuck), and the level of the confidence
    Mutant("rounds: the rates fall over the whole run", "training/refiner.py", "steps, total = self.steps - first * self.steps_per_epoch, (following - first) * self.steps_per_epoch", "steps, total = self.steps, self.settings.epochs * self.steps_per_epoch", REVIEW),
    Mutant("rounds: never stuck", "training/review.py", "ratio > STUCK", "ratio > 1e9", REVIEW),
    Mutant("rounds: always stuck", "training/review.py", "ratio > STUCK", "ratio > 0", REVIEW),
    Mutant("rounds: settled while moving", "training/review.py", "moved < SETTLED", "moved > SETTLED", REVIEW),
    Mutant("rounds: old moments are kept", "training/steps.py", "optimizer.state.pop(parameter, None)", "pass", REVIEW),
    Mutant("basins: empty clusters count", "core/kmeans.py", "free = kmeans(points, len(used), generator, starts=starts)", "free = kmeans(points, int(assignment.max()) + 1, generator, starts=starts)", "core/test_kmeans.py"),
    Mutant("probe: asked of what it has learnt", "core/probe.py", "for learnt, asked in (halves, halves[::-1]):", "for learnt, asked in ((halves[0], halves[0]), (halves[1], halves[1])):", "core/test_probe.py"),
    # The collapse guard: each comparison turned
    Mutant("collapse: nothing is selected", "training/collapse.py", "if now.selected < NOTHING:", "if now.selected > NOTHING:", COLLAPSE),
    Mutant("collapse: nothing was selected before", "training/collapse.py", "before < NOTHING and", "before > NOTHING and", COLLAPSE),
    Mutant("collapse: the selection falls", "training/collapse.py", "now.selected <= before", "now.selected > before", COLLAPSE),
    Mutant("collapse: the selection stays", "training/collapse.py", "now.selected <= before", "now.selected < before", COLLAPSE),
    Mutant("collapse: few are selected", "training/collapse.py", "elif now.selected < few:", "elif now.selected > few:", COLLAPSE),
    Mutant("collapse: other selections have the fixed threshold", "training/collapse.py", "== \"fixed\" else FEW", "!= \"fixed\" else FEW", COLLAPSE),
    Mutant("collapse: the selection shrinks", "training/collapse.py", "elif now.selected < SHRUNK * most:", "elif now.selected > SHRUNK * most:", COLLAPSE),
    Mutant("collapse: confidence at chance", "training/collapse.py", "if level < CHANCE:", "if level > CHANCE:", COLLAPSE),
    Mutant("collapse: three epochs at chance", "training/collapse.py", "len(past.last) == 3 and", "len(past.last) < 3 and", COLLAPSE),
    Mutant("collapse: confidence does not rise", "training/collapse.py", "now.confidence <= past.last[0].confidence", "now.confidence > past.last[0].confidence", COLLAPSE),
    Mutant("collapse: chance for good", "training/collapse.py", "< CHANCE_FOR_GOOD", "> CHANCE_FOR_GOOD", COLLAPSE),
    Mutant("collapse: old heads may lose confidence", "training/collapse.py", "settings.init != \"keep\" and", "settings.init == \"keep\" and", COLLAPSE),
    Mutant("collapse: confidence falls unheeded", "training/collapse.py", "now.confidence < UNHEEDED * most", "now.confidence > UNHEEDED * most", COLLAPSE),
    Mutant("collapse: few images teach", "training/collapse.py", "now.selected < HARDLY_TAUGHT", "now.selected > HARDLY_TAUGHT", COLLAPSE),
    Mutant("collapse: confidence falls", "training/collapse.py", "if now.confidence < lost * most", "if now.confidence > lost * most", COLLAPSE),
    Mutant("collapse: the cluster has grown", "training/collapse.py", "if now.largest > first.largest", "if now.largest < first.largest", COLLAPSE),
    Mutant("collapse: two epochs in one cluster", "training/collapse.py", "len(past.last) > 1 and all(", "len(past.last) <= 1 and all(", COLLAPSE),
    Mutant("collapse: clusters die", "training/collapse.py", "elif now.used <= (1 - UNUSED) * clusters:", "elif now.used > (1 - UNUSED) * clusters:", COLLAPSE),
    Mutant("collapse: a quarter of the clusters", "training/collapse.py", "elif now.used <= (1 - UNUSED) * clusters:", "elif now.used < (1 - UNUSED) * clusters:", COLLAPSE),
    Mutant("collapse: saturated", "training/collapse.py", "if now.confidence > SATURATED", "if now.confidence < SATURATED", COLLAPSE),
    Mutant("collapse: half of the clusters", "training/collapse.py", "now.used <= clusters / 2", "now.used > clusters / 2", COLLAPSE),
    Mutant("collapse: exactly half of the clusters", "training/collapse.py", "now.used <= clusters / 2", "now.used < clusters / 2", COLLAPSE),
    Mutant("collapse: two clusters", "training/collapse.py", "if clusters == 2:", "if clusters != 2:", COLLAPSE),
    Mutant("collapse: one of two swallows", "training/collapse.py", "now.largest > ALL_IN_ONE and", "now.largest < ALL_IN_ONE and", COLLAPSE),
    Mutant("collapse: one of two was large", "training/collapse.py", "first.largest < 0.9", "first.largest > 0.9", COLLAPSE),
    Mutant("collapse: swallowed", "training/collapse.py", "level > SWALLOWED", "level < SWALLOWED", COLLAPSE),
    Mutant("collapse: doubled", "training/collapse.py", "now.largest > 2 * first.largest", "now.largest < 2 * first.largest", COLLAPSE),
    Mutant("collapse: large", "training/collapse.py", "level > LARGE", "level < LARGE", COLLAPSE),
    Mutant("collapse: one is used", "training/collapse.py", "epoch.used == 1", "epoch.used != 1", COLLAPSE),
    Mutant("collapse: more than two clusters", "training/collapse.py", "(clusters > 2 and", "(clusters <= 2 and", COLLAPSE),
    Mutant("collapse: all in one", "training/collapse.py", "epoch.largest > ALL_IN_ONE", "epoch.largest < ALL_IN_ONE", COLLAPSE),
    Mutant("collapse: thin batches", "training/collapse.py", "settings.batch_size < THIN * settings.clusters", "settings.batch_size > THIN * settings.clusters", COLLAPSE),
    Mutant("collapse: thin batches, exactly", "training/collapse.py", "settings.batch_size < THIN * settings.clusters", "settings.batch_size <= THIN * settings.clusters", COLLAPSE),
    Mutant("collapse: fast rates", "training/collapse.py", "if rate > 1.001", "if rate < 1.001", COLLAPSE),
    Mutant("collapse: a weak start", "training/collapse.py", "< WEAK_START", "> WEAK_START", COLLAPSE),
    Mutant("collapse: a lower threshold", "training/collapse.py", "0 < lower < settings.threshold", "0 < lower <= settings.threshold", COLLAPSE),
    Mutant("collapse: the entropy's weight", "training/collapse.py", "settings.entropy_weight < 1", "settings.entropy_weight <= 1", COLLAPSE),
    Mutant("collapse: two clusters are left", "training/collapse.py", "now.used >= 2", "now.used > 2", COLLAPSE),
    Mutant("collapse: the last epoch", "training/collapse.py", "len(history) >= settings.epochs", "len(history) > settings.epochs", COLLAPSE),
    # The quality card: each comparison turned
    Mutant("quality: empty clusters are small", "evaluation/quality.py", "0 < size <", "0 <= size <", QUALITY),
    Mutant("quality: small", "evaluation/quality.py", "size < HARDLY_USED", "size > HARDLY_USED", QUALITY),
    Mutant("quality: exactly small", "evaluation/quality.py", "size < HARDLY_USED", "size <= HARDLY_USED", QUALITY),
    Mutant("quality: collapsed", "evaluation/quality.py", "if largest > (", "if largest < (", QUALITY),
    Mutant("quality: exactly collapsed", "evaluation/quality.py", "if largest > (", "if largest >= (", QUALITY),
    Mutant("quality: collapsed of two", "evaluation/quality.py", "COLLAPSED if clusters > 2", "COLLAPSED if clusters <= 2", QUALITY),
    Mutant("quality: enough images for two kinds", "evaluation/quality.py", "if size >= FEW_IMAGES", "if size < FEW_IMAGES", QUALITY),
    Mutant("quality: exactly enough images for two kinds", "evaluation/quality.py", "if size >= FEW_IMAGES", "if size > FEW_IMAGES", QUALITY),
    Mutant("quality: two kinds", "evaluation/quality.py", "separation(points, halves) > max(", "separation(points, halves) < max(", QUALITY),
    Mutant("quality: as far as the nearest", "evaluation/quality.py", "max(TWO_KINDS, apart)", "min(TWO_KINDS, apart)", QUALITY),
    Mutant("quality: least part", "evaluation/quality.py", "LEAST_PART < halves", "LEAST_PART > halves", QUALITY),
    Mutant("quality: largest part", "evaluation/quality.py", "halves.float().mean() < 1 - LEAST_PART", "halves.float().mean() > 1 - LEAST_PART", QUALITY),
    Mutant("quality: no least part", "evaluation/quality.py", "LEAST_PART < halves", "0.0 < halves", QUALITY),
    Mutant("quality: no largest part", "evaluation/quality.py", "< 1 - LEAST_PART", "< 1.0", QUALITY),
    Mutant("quality: one kind", "evaluation/quality.py", "if apart < ONE_KIND", "if apart > ONE_KIND", QUALITY),
    Mutant("quality: the farthest cluster is asked", "evaluation/quality.py", "nearest = min(others,", "nearest = max(others,", QUALITY),
]
# fmt: on


def main(words: Sequence[str] | None = None) -> int:
    """Run the mutants and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--only", metavar="NAME", action="append", help="run the mutants with this in their name")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at the same time (default 2)")
    options = parser.parse_args(words)
    mutants = [m for m in MUTANTS if not options.only or any(part in m.name for part in options.only)]
    check_mutants(mutants)
    if options.list:
        print("\n".join(f"{mutant.name} ({mutant.module})" for mutant in mutants))
        return 0
    began = time.monotonic()
    outcomes = run_mutants(mutants, options.jobs, lambda line: print(line, flush=True))
    bad = [name for name, outcome in outcomes.items() if outcome != NOTICED]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} mutants noticed in {time.monotonic() - began:.0f} s")
    for name in bad:
        print(f"{outcomes[name]}: {name}")
    return 1 if bad else 0


def check_mutants(mutants: Sequence[Mutant]) -> None:
    """Refuse names that are used twice, changes that do not apply and tests that do not exist."""
    names = [mutant.name for mutant in mutants]
    if len(set(names)) != len(names):
        raise ValueError(f"names are used twice: {sorted({name for name in names if names.count(name) > 1})}")
    for mutant in mutants:
        mutant.mutate((ROOT / PACKAGE / mutant.module).read_text())
        for test in mutant.tests.split():
            if not (ROOT / UNIT / test.split("::")[0]).exists():
                raise ValueError(f"{mutant.name}: there is no tests/unit/{test}")


def run_mutants(mutants: Sequence[Mutant], jobs: int, log: Callable[[str], None]) -> dict[str, str]:
    """Return the outcome of each mutant, by name; first the tests must pass on the unchanged package."""
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        for job in range(jobs):
            copies.put(_copy(Path(folder) / str(job)))
        healthy = copies.get()
        tests = sorted({test for mutant in mutants for test in mutant.tests.split()})
        if _run_tests(healthy, tests) != 0:
            raise SystemExit(f"the tests fail without any mutant; see: pytest {' '.join(str(UNIT / t) for t in tests)}")
        copies.put(healthy)

        def run(mutant: Mutant) -> str:
            copy = copies.get()
            module = copy / PACKAGE / mutant.module
            text = module.read_text()
            try:
                module.write_text(mutant.mutate(text))
                code = _run_tests(copy, mutant.tests.split())
            finally:
                module.write_text(text)
                copies.put(copy)
            outcome = {0: SURVIVED, 1: NOTICED}.get(code, INVALID)
            log(f"{outcome}: {mutant.name}")
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return dict(zip([mutant.name for mutant in mutants], pool.map(run, mutants), strict=True))


def _copy(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    for part in (PACKAGE, UNIT, Path("tests/helpers")):
        shutil.copytree(ROOT / part, folder / part, ignore=ignore)
    for file in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / file, folder / file)
    return folder


def _run_tests(folder: Path, tests: Sequence[str]) -> int:
    """Return pytest's exit code: 0 all passed, 1 some failed, others where tests could not run."""
    options = ["-x", "-n", "0", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(str(UNIT / test) for test in tests)]
    # No bytecode: a mutant has the size and the second of its original, which would be taken for unchanged.
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    limits = {"timeout": SECONDS * len(tests), "capture_output": True}
    try:
        return subprocess.run(command, cwd=folder, env=environment, **limits).returncode
    except subprocess.TimeoutExpired:
        return 1


if __name__ == "__main__":
    sys.exit(main())
