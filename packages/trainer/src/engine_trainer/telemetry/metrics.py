"""The metrics of a run: the meaning of each, and the curves that a report shows first.

docs/metrics.md is made from the table (tools/metrics.py), and the report explains metrics with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

CURVES = 6
"""Number of curves that a report shows first."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A picture of metrics that belong together, as patterns of their names."""

    title: str
    metrics: tuple[str, ...]


_GRADIENT = Curve(title="Gradient norm", metrics=("train/grad_norm",))
_RATE = Curve(title="Learning rate", metrics=("train/lr",))
_SPEED = Curve(title="Tokens per second", metrics=("perf/tokens_per_s",))
_LOSS = Curve(title="Loss", metrics=("train/loss", "eval/loss", "eval/*/loss"))
_HELD_OUT = Curve(title="Held-out accuracy", metrics=("eval/accuracy", "eval/*/accuracy"))
_PAIRS = (
    _LOSS,
    Curve(title="Accuracy", metrics=("train/accuracy", "eval/accuracy")),
    Curve(title="Margin", metrics=("train/margin", "eval/margin")),
    Curve(title="Rewards", metrics=("train/chosen", "train/rejected")),
    _GRADIENT,
    _RATE,
    _SPEED,
)
# The first six that a run has and that are not flat are shown, so that the later ones stand in.
CURVES_OF: Mapping[str, tuple[Curve, ...]] = {
    "sft": (
        _LOSS,
        _HELD_OUT,
        _GRADIENT,
        _RATE,
        _SPEED,
        Curve(title="Learned tokens", metrics=("train/learned_tokens",)),
        Curve(title="Balance loss", metrics=("train/balance_loss",)),
        Curve(title="MFU", metrics=("perf/mfu",)),
        Curve(title="Micro-batches", metrics=("train/micro_batches",)),
    ),
    "rl": (
        _HELD_OUT,
        Curve(title="Reward", metrics=("train/reward",)),
        Curve(title="Response length", metrics=("rollout/response_length", "eval/response_length")),
        Curve(title="Entropy", metrics=("train/entropy",)),
        _GRADIENT,
        Curve(title="Rollout mismatch", metrics=("mismatch/kl_k3",)),
        Curve(title="Critic's explained variance", metrics=("critic/explained_variance",)),
        Curve(title="Groups without a signal", metrics=("rollout/uninformative_groups",)),
        Curve(title="Completions cut off", metrics=("rollout/truncated",)),
        Curve(title="Generated tokens per second", metrics=("perf/generated_tokens_per_s",)),
    ),
    "dpo": _PAIRS,
    "kto": (
        _LOSS,
        Curve(title="Accuracy", metrics=("train/accuracy", "eval/accuracy")),
        Curve(title="Rewards", metrics=("train/desirable", "train/undesirable")),
        Curve(title="Margin", metrics=("train/margin", "eval/margin")),
        Curve(title="Baseline", metrics=("train/baseline", "eval/baseline")),
        _GRADIENT,
        _RATE,
        _SPEED,
    ),
    "rm": _PAIRS,
}
# The most important metrics come first in the summary, where a run has them.
HEADLINES = (
    "eval/accuracy",
    "eval/*/accuracy",
    "eval/maj@*",
    "eval/*/maj@*",
    "train/reward",
    "train/loss",
    "eval/loss",
    "eval/*/loss",
    "train/grad_norm",
    "mismatch/kl_k3",
    "rollout/staleness",
    "rollout/response_length",
    "perf/tokens_per_s",
    "perf/generated_tokens_per_s",
    "perf/mfu",
)
# A metric is better when it is smaller if its name contains one of these words.
LESS_IS_BETTER = ("loss", "norm", "perplexity", "mismatch", "staleness")

# Meanings by name, each one sentence. * stands for any text. The first pattern that fits counts.
MEANINGS: Mapping[str, str] = {
    "train/loss": "Loss of the step's updates, a mean over what the step learns from; in RL it "
    "says nothing about progress, because advantages add up to about 0.",
    "train/reward": "Mean reward of all completions that the step generated.",
    "train/reward_std": "Standard deviation of the rewards of all completions of the step.",
    "train/accuracy": "Share of correct ones among the step's completions; with pairs, the share "
    "in which the chosen answer has the higher reward, and with labelled rows the share whose "
    "log-ratio is on the label's side of the baseline.",
    "train/margin": "Mean difference between the rewards of the chosen and of the rejected answers "
    "of the step's pairs, or between those of its desirable and undesirable rows.",
    "train/desirable": "Mean reward of the step's desirable rows, β times the log-ratio to the "
    "reference.",
    "train/undesirable": "Mean reward of the step's undesirable rows, β times the log-ratio to the "
    "reference.",
    "train/baseline": "Mean log-ratio of the step's prompts with the completions of other rows, of "
    "which KTO's baseline is the positive part.",
    "train/desirable_share": "Share of desirable rows in the step.",
    "train/chosen": "Mean reward of the chosen answers of the step's pairs; for DPO it is β times "
    "the log-ratio to the reference.",
    "train/rejected": "Mean reward of the rejected answers of the step's pairs; for DPO it is β "
    "times the log-ratio to the reference.",
    "train/grad_norm": "Norm of the gradient before it is clipped; a jump of several orders of "
    "magnitude announces trouble.",
    "train/lr": "Learning rate of the step's last update.",
    "train/tokens": "Tokens in all updates of the step, prompts included.",
    "train/learned_tokens": "Tokens of the step that carry loss.",
    "train/balance_loss": "Balance loss of a mixture of experts, without its factor "
    "(`engine.options.balance_loss`): the number of its layers with experts where every document's "
    "tokens are spread evenly, and more where few experts serve most of them.",
    "train/micro_batches": "Number of micro-batches that the step was computed in.",
    "train/images": "Images and videos that the step learned from.",
    "train/patches": "Rows of pixels of these images: patches, or whole tiles.",
    "train/bad_images": "Documents, or prompts of rl, that were left out of the step because an "
    "image of theirs could not be decoded.",
    "train/skipped": "Updates that were skipped because a number was not finite; weights and "
    "optimizer stay as they were.",
    "train/updates": "Updates of the optimizer that the step applied; 0 means that nothing was "
    "learned.",
    "train/epoch": "Passes over the training data so far.",
    "train/entropy": "Mean entropy in nats of the policy's distribution over the next token; "
    "towards 0 there is nothing left to explore.",
    "train/ratio": "Mean ratio of the policy's probability of a token to that before the step's "
    "updates; 1 with a single update a step.",
    "train/old_kl": "KL in nats a token (k3) between the policy before the step's updates and the "
    "policy that is updated; 0 with a single update a step.",
    "train/ref_kl": "KL in nats a token between policy and reference model, as the loss estimates "
    "it.",
    "train/teacher_kl": "Divergence in nats a token between policy and teacher "
    "(algorithm.teacher.divergence); with kl: sampled the KL, estimated from the sampled tokens "
    "(k1).",
    "train/kl": "KL in nats a token between policy and reference model, as it lowers the rewards.",
    "train/kl_coefficient": "Coefficient of the KL in the rewards, which an adaptive controller "
    "moves.",
    "train/clipped_low": "Share of tokens whose ratio is clipped at the lower bound; in PPO's loss "
    "they teach nothing.",
    "train/clipped_high": "Share of tokens whose ratio is clipped at the upper bound; in PPO's "
    "loss they teach nothing.",
    "train/clipped_dual": "Share of tokens with a negative advantage whose loss is bounded by the "
    "dual clip.",
    "train/sequence_masked": "Share of tokens in completions with a negative advantage that are so "
    "far from the rollout that `algorithm.sequence_mask` leaves them out.",
    "critic/explained_variance": "Share of the variance of the returns that the critic's values "
    "explain; 1 is all, and 0 is no better than their mean.",
    "critic/loss": "Loss of the critic's updates.",
    "critic/value": "Mean value that the critic gives to a token.",
    "critic/return": "Mean return of a token, which the critic learns.",
    "critic/clipped": "Share of tokens whose value loss is clipped.",
    "critic/grad_norm": "Norm of the critic's gradient before it is clipped.",
    "critic/lr": "Learning rate of the critic.",
    "critic/updates": "Updates of the critic that the step applied.",
    "critic/skipped": "Updates of the critic that were skipped because a number was not finite.",
    "rollout/uninformative_groups": "Share of problems whose completions all have the same reward, "
    "and that therefore teach nothing.",
    "rollout/response_length": "Mean number of tokens of a completion.",
    "rollout/response_length_max": "Number of tokens of the step's longest completion, which a "
    "synchronous step waits for.",
    "rollout/truncated": "Share of completions that were cut off before they ended by themselves.",
    "rollout/tokens": "Tokens that the model generated in the step.",
    "rollout/accepted_length": "Mean number of tokens that a forward pass of the rollout adds to a "
    "completion, with speculative decoding (`rollout.options.speculative`): 1 is no gain, and "
    "generation is faster by at most this factor.",
    "rollout/replayed": "Share of tokens of prompts and completions whose experts the engine takes "
    "from the rollout (`rollout.routed_experts`).",
    "rollout/groups": "Problems that the step learns from.",
    "rollout/rounds": "Rounds of generation; more than 1 where dynamic sampling replaced groups.",
    "rollout/dropped_groups": "Groups that were dropped because no token in them was fresh enough.",
    "rollout/staleness": "Mean age, in updates, of the weights that made the tokens.",
    "rollout/staleness_max": "Largest age, in updates, of the weights that made a token.",
    "rollout/stale_tokens": "Tokens that carry no loss because the weights that made them are too "
    "old.",
    "rollout/continued": "Share of completions that were made by more than one version of the "
    "weights.",
    "mismatch/kl_k1": "KL in nats a token between rollout and engine, estimated without bias by "
    "the mean log-ratio; it may be negative.",
    "mismatch/kl_k3": "KL in nats a token between rollout and engine, never negative; 0 means that "
    "both compute the same log-probs.",
    "mismatch/rms": "Root mean square of the difference between the log-probs of engine and "
    "rollout, in nats.",
    "mismatch/max": "Largest difference between the log-probs of engine and rollout, in nats.",
    "mismatch/token_mult_prob_error": "Mean factor by which the probabilities of engine and "
    "rollout differ; 1 is perfect.",
    "mismatch/chi2_token": "χ² divergence between engine and rollout over tokens; 0 is perfect.",
    "mismatch/chi2_sequence": "χ² divergence between engine and rollout over whole completions; 0 "
    "is perfect.",
    "mismatch/ess_token": "Share of the tokens that still count when they are weighted by the "
    "ratio of engine to rollout; 1 is all.",
    "mismatch/ess_sequence": "Share of the completions that still count when they are weighted by "
    "the ratio of engine to rollout; 1 is all.",
    "mismatch/ppl_engine": "Mean perplexity of the completions by the engine's log-probs.",
    "mismatch/ppl_rollout": "Mean perplexity of the completions by the rollout's log-probs.",
    "mismatch/ppl_ratio": "Mean quotient of the two perplexities, engine over rollout; 1 is "
    "perfect.",
    "correction/weight_mean": "Mean weight that the correction gives to a token or completion.",
    "correction/ess": "Effective sample size of the correction's weights, as a share; 1 is all.",
    "correction/clipped": "Share of tokens or completions whose weight is above the cap.",
    "correction/masked_low": "Share of tokens below IcePop's band, whose weight is 0.",
    "correction/masked_high": "Share of tokens above IcePop's band, whose weight is 0.",
    "correction/rejected_low": "Share of tokens or completions below the band of rejection.",
    "correction/rejected_high": "Share of tokens or completions above the band of rejection.",
    "correction/rejected_tokens": "Share of tokens that lost their loss by rejection.",
    "reward/timeouts": "Calls of reward functions that took too long in the step.",
    "reward/timeouts/*": "Calls of this reward function that took too long in the step.",
    "reward/failures": "Calls of reward functions that failed in the step.",
    "reward/failures/*": "Calls of this reward function that failed in the step.",
    "reward/*": "Mean of this reward, without its weight, over the step's completions.",
    "agent/turns": "Mean number of the model's turns in a conversation.",
    "agent/tool_tokens": "Mean number of tokens of a conversation that the model did not make.",
    "agent/limit": "Share of conversations that ended because no turn or token was left.",
    "agent/timeout": "Share of conversations that ended at their time limit.",
    "agent/failed": "Share of conversations whose function raised an error.",
    "data/dropped": "Rows that were left out because they are too long.",
    "data/truncated": "Rows that were cut because they are too long.",
    "data/bad_images": "Rows that were left out because their images cannot be used.",
    "eval/accuracy": "Share of correct completions to the held-out problems; with pairs, of "
    "held-out pairs whose chosen answer has the higher reward, and with labelled rows of those "
    "whose log-ratio is on the label's side of the baseline.",
    "eval/accuracy_stderr": "Standard error of the held-out accuracy; smaller changes are noise.",
    "eval/loss": "Mean loss on the held-out rows; a rise while the training loss falls is "
    "overfitting.",
    "eval/perplexity": "Exponential of the held-out loss: the number of equally likely tokens that "
    "the model hesitates between.",
    "eval/margin": "Mean difference between the rewards of the chosen and of the rejected answers "
    "of the held-out pairs, or between those of the desirable and undesirable rows.",
    "eval/desirable": "Mean reward of the held-out desirable rows.",
    "eval/undesirable": "Mean reward of the held-out undesirable rows.",
    "eval/desirable_share": "Share of desirable rows among the held-out ones.",
    "eval/baseline": "Mean log-ratio of held-out prompts with the completions of other rows, of "
    "which KTO's baseline is the positive part.",
    "eval/chosen": "Mean reward of the chosen answers of the held-out pairs.",
    "eval/rejected": "Mean reward of the rejected answers of the held-out pairs.",
    "eval/reward": "Mean reward of the completions to the held-out problems.",
    "eval/response_length": "Mean number of tokens of a completion to a held-out problem.",
    "eval/truncated": "Share of completions to held-out problems that were cut off.",
    "eval/timeouts": "Calls of reward functions that took too long in the evaluation.",
    "eval/failures": "Calls of reward functions that failed in the evaluation.",
    "eval/problems": "Number of held-out problems that were measured.",
    "eval/bad_images": "Held-out rows that were not measured because an image of theirs could not "
    "be decoded.",
    "eval/mean@*": "Mean accuracy over this many samples a problem.",
    "eval/best@*": "Probability that one of this many samples of a problem is correct (pass@k), "
    "without bias.",
    "eval/maj@*": "Accuracy of the answer that most of this many samples of a problem give.",
    "perf/tokens_per_s": "Tokens trained on per second, over all ranks.",
    "perf/trained_tokens_per_s": "Tokens of the step's updates per second of computing them.",
    "perf/generated_tokens_per_s": "Generated tokens per second of generation, over all replicas.",
    "perf/mfu": "Model FLOP utilization: the share of the devices' peak that the updates use.",
    "perf/elapsed_s": "Seconds that the run took so far, without interruptions.",
    "sync/bytes": "Bytes of the weights that one weight sync brought to a replica.",
    "sync/wire_bytes": "Bytes that one weight sync sent over the rollout's own wire.",
    "sync/tensors": "Tensors that one weight sync brought to a replica.",
    "sync/quantized": "Tensors that one weight sync quantized.",
    "sync/audited": "1 if the checksums of the served weights were compared with the engine's.",
    "sync/paused_s": "Seconds for which running completions waited for a weight sync, at most.",
    "sync/*_s": "Seconds of this phase of a weight sync, in the slowest replica.",
    "time/generate": "Seconds of generation since the row before.",
    "time/train": "Seconds of updates since the row before.",
    "time/log_probs": "Seconds of log-probs of the policy and the reference since the row before.",
    "time/values": "Seconds of the critic's values since the row before.",
    "time/critic": "Seconds of the critic's updates since the row before.",
    "time/reward": "Seconds of reward functions since the row before.",
    "time/sync": "Seconds of weight syncs since the row before.",
    "time/eval": "Seconds of evaluations since the row before.",
    "time/save": "Seconds that the loop waited for checkpoints since the row before.",
    "time/rollouts": "Seconds that the loop waited for files of rollouts since the row before.",
    "time/wait": "Seconds that the loop waited for completions since the row before.",
    "time/judge": "Seconds of scoring pairs or labelled rows before their update since the row "
    "before.",
    "time/reference": "Seconds of the reference model's log-probs since the row before.",
    "time/*": "Seconds of this phase since the row before.",
    "replicas/serving": "Replicas of the rollout that serve (``ray.elastic``).",
    "replicas/lost": "Processes of replicas that were lost since the row before, with those that "
    "failed to start (``ray.elastic``).",
    "replicas/rejoin_s": "Seconds from the loss of a replica to the moment in which its successor "
    "serves, the longest since the row before (``ray.elastic``).",
    "worker/idle": "Share of the time in which workers had nothing to do, a mean over workers.",
    "worker/*/idle": "Share of the time in which this worker had nothing to do.",
    "worker/*_s": "Seconds that this worker spent in this call since the row before.",
}


def explain(name: str) -> str:
    """Return the meaning of a metric in one sentence, empty for one that the table lacks.

    A metric of a held-out set with a name (``eval/aime/accuracy``) has that of the unnamed set.
    """
    group, _, last = name.rpartition("/")
    if group.startswith("eval/"):
        name = f"eval/{last}"
    return next((text for pattern, text in MEANINGS.items() if fnmatchcase(name, pattern)), "")


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that fit a pattern, in the order of the patterns and then by name."""
    known = sorted(names)
    found = (name for pattern in patterns for name in known if fnmatchcase(name, pattern))
    return list(dict.fromkeys(found))
