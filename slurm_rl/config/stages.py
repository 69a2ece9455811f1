"""Which stages a run has, and whose work is like whose. Pure: a function of `Settings`."""

from __future__ import annotations

from slurm_rl.config.schema import EVAL_PREFIX, POOL_PREFIX, Settings

#: Sections that any configuration may have. Which stages a run has is `stage_kinds`.
STAGE_KINDS = ("init", "rollout", "score", "reference", "teacher", "critic", "train", "tick")

#: Those that one may leave out altogether.
_OPTIONAL = ("teacher", "critic")


def needs_score(settings: Settings) -> bool:
    """Whether rewards come from a stage of their own, between rollout and train."""
    score = settings.score
    defers = any(service.on_down == "defer" for service in settings.services.values())
    return score.enabled or score.server is not None or defers


def eval_kinds(settings: Settings) -> tuple[str, ...]:
    """The kinds of stages that evaluate, in the order of the configuration."""
    return tuple(f"{EVAL_PREFIX}{name}" for name in settings.eval)


def section_of(kind: str) -> tuple[str, ...]:
    """Where the configuration has a stage's own settings: `("eval", "aime")` for `eval-aime`,
    `("rollout", "pools", "spot")` for the jobs `rollout-spot`."""
    if kind.startswith(EVAL_PREFIX):
        return "eval", kind.removeprefix(EVAL_PREFIX)
    if kind.startswith(POOL_PREFIX):
        return "rollout", "pools", kind.removeprefix(POOL_PREFIX)
    return (kind,)


def section_kinds(settings: Settings) -> tuple[str, ...]:
    """The kinds of stages that the settings have a section for, used or not."""
    given = [k for k in STAGE_KINDS if k not in _OPTIONAL or getattr(settings, k) is not None]
    return (*given, *eval_kinds(settings))


def stage_kinds(settings: Settings) -> tuple[str, ...]:
    """The kinds of stages that the run has: those of the chain in turn, evaluations, ticks."""
    has = {
        "score": needs_score(settings),
        "reference": needs_reference_stage(settings),
        "teacher": settings.teacher is not None,
        "critic": settings.critic is not None,
        "tick": False,
    }
    chain = (kind for kind in STAGE_KINDS if has.get(kind, True))
    return (*chain, *eval_kinds(settings), "tick")


def is_supervised(settings: Settings, iteration: int) -> bool:
    """Whether an iteration fine-tunes on labels, and samples nothing."""
    return iteration < settings.train.sft_iterations


def uses_reference(settings: Settings) -> bool:
    """Whether anything is measured against a reference policy."""
    return settings.train.use_kl_loss or settings.train.kl_coef > 0


def moves_reference(settings: Settings) -> bool:
    """Whether the reference is not the same in every iteration."""
    reference = settings.reference
    return reference.update_interval is not None or reference.ema is not None


def needs_reference_stage(settings: Settings) -> bool:
    """Whether log-probs of policy and reference come from a stage before the train stage."""
    needed = settings.train.kl_coef > 0 or settings.reference.stage or moves_reference(settings)
    return uses_reference(settings) and needed


def stands_in(settings: Settings, kind: str) -> str | None:
    """The stage that says what `kind` does not set for its job: one that does the same work, or
    needs the same libraries."""
    if kind == "score" or kind.startswith((EVAL_PREFIX, POOL_PREFIX)):
        return "rollout"
    if kind == "teacher" and settings.teacher is not None:
        return "rollout" if settings.teacher.backend == "sglang" else "train"
    return "train" if kind in ("reference", "critic") else None


def is_megatron_stage(settings: Settings, kind: str) -> bool:
    """Whether a stage's program is made of ranks that run a model by Megatron-core."""
    if kind == "teacher":
        return settings.teacher is not None and settings.teacher.backend == "megatron"
    return kind in ("train", "critic", "reference")
