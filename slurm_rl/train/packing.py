"""Which sequences go through the model together: balanced ranks, bins under a token budget.

Pure plans over lengths; what a micro-batch holds is `batch.py`'s. No sequence is dropped, doubled
or cut: one that is longer than the budget gets a bin of its own.

The cost of a sequence of L tokens is its forward FLOPs, `linear × L + quadratic × L²`: the weights
that each token meets, and the causal half of attention (`token_costs`). Ranks get equal sums of
costs by the largest differencing method (Karmarkar and Karp 1982); bins are filled by first-fit
in decreasing order of length (at most 11/9 of the fewest bins, plus one).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Budget:
    """How packed micro-batches of one step are cut.

    max_tokens:  tokens of one micro-batch over all context ranks.
    linear, quadratic: FLOPs of a sequence (see the module).
    sequence_multiple: each sequence is padded to a multiple of it (context parallelism).

    Example: Budget(max_tokens=4096).
    """

    max_tokens: int
    linear: int = 1
    quadratic: int = 0
    sequence_multiple: int = 1


def token_costs(config: Any, *, vocab_size: int) -> tuple[int, int]:
    """(linear, quadratic) of a model, from Megatron's config: forward FLOPs.

    Each token meets the projections of attention, the MLP (of a mixture: the experts it is sent
    to) and the output layer, 2 FLOPs a weight; and each earlier token twice, in every head.
    """
    width = config.num_attention_heads * config.kv_channels
    groups = (config.num_query_groups or config.num_attention_heads) * config.kv_channels
    experts = config.num_moe_experts and config.moe_router_topk * config.moe_ffn_hidden_size
    mlp = 3 * (experts or config.ffn_hidden_size)
    layer = config.hidden_size * (2 * width + 2 * groups + mlp)
    linear = 2 * (config.num_layers * layer + config.hidden_size * vocab_size)
    return linear, 2 * config.num_layers * width


def plan_packed(
    members: Sequence[int], lengths: Sequence[int], *, num_ranks: int, budget: Budget
) -> list[list[list[int]]]:
    """The samples `members` of a step by [data-parallel rank][micro-batch].

    lengths: of every sample of the rollout. Members of a micro-batch are in order, and so are the
    first members of a rank's micro-batches. A rank without samples gets no micro-batch.

    Example: members 0..3 of lengths 5, 1, 2, 2 on two ranks, budget 5: [[[0]], [[1, 2, 3]]].
    """
    padded = [-(-n // budget.sequence_multiple) * budget.sequence_multiple for n in lengths]
    costs = [padded[i] * (budget.linear + budget.quadratic * padded[i]) for i in members]
    ranks = []
    for share in balance(costs, num_parts=num_ranks):
        own = sorted(members[place] for place in share)
        bins = first_fit([padded[i] for i in own], max_tokens=budget.max_tokens)
        ranks.append([[own[place] for place in places] for places in bins])
    return ranks


def balance(costs: Sequence[int], *, num_parts: int) -> list[list[int]]:
    """Indices of `costs` in parts of sums as equal as the largest differencing method finds.

    Parts are in order of their first index, empty ones last. Ties are broken by the indices, so
    that every process finds the same parts.
    """
    # A state is a partition of some of the indices: sums, largest first, with their indices.
    # The two that are least even are joined, the large sums of one with the small of the other.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, cost in enumerate(costs):
        state = [(cost, [index])] + [(0, []) for _ in range(num_parts - 1)]
        heapq.heappush(heap, (-cost if num_parts > 1 else 0, index, state))
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        joined = [
            (a + b, own + more) for (a, own), (b, more) in zip(one, reversed(other), strict=True)
        ]
        joined.sort(key=lambda part: (-part[0], part[1]))
        spread = joined[0][0] - joined[-1][0]
        heapq.heappush(heap, (-spread, min(first, second), joined))
    parts = [sorted(own) for _, own in heap[0][2]] if heap else [[] for _ in range(num_parts)]
    return sorted(parts, key=lambda own: own[0] if own else len(costs))


def first_fit(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `max_tokens`, or of one sequence that is longer."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = (n for n, left in enumerate(room) if lengths[index] <= left)
        number = next(fitting, len(bins))
        if number == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[number].append(index)
        room[number] -= lengths[index]
    return sorted(sorted(own) for own in bins)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple
