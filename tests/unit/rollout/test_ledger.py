"""The account of a batch against an oracle that looks at the whole history at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import DataError
from slurm_rl.rollout.ledger import BatchRule, Decision, Ledger, plan_rule


def drive(rule, keeps, order, *, num_carried=0):
    """Enter as many visits as the ledger wants, judge the open ones in `order` (a draw each).

    Returns the decision, and the verdicts as (group, keep) in the order in which they were given.
    """
    ledger, given_verdicts, entered = Ledger(rule, num_carried=num_carried), [], 0
    for draw in [*order, *range(10_000)]:
        while entered < num_carried or ledger.wants_more():  # carried ones come first, all of them
            ledger.enter(100 + entered)
            entered += 1
        decision = ledger.decide()
        if decision is not None:
            assert ledger.decide() == decision, "it depends on how often it is asked"
            return decision, given_verdicts, entered
        open_groups = ledger.open_groups()
        group = open_groups[draw % len(open_groups)]
        keep = keeps[(group - 100) % len(keeps)]
        assert ledger.judge(group, keep=keep, reason="same")
        assert not ledger.judge(group, keep=not keep), "a second verdict counted"
        given_verdicts.append((group, keep))
    raise AssertionError("never decided")


rules = st.builds(
    lambda n, quorum, width, admission: BatchRule(
        n, max(1, min(n, quorum)), max(n, width), 500, admission, may_fall_short=True
    ),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 16),
    st.sampled_from(["cursor", "arrival"]),
)
verdicts = st.lists(st.booleans(), min_size=1, max_size=40).filter(any)


@settings(max_examples=300, deadline=None)
@given(rules, verdicts, st.lists(st.integers(0, 1000), max_size=60), st.integers(0, 6))
def test_it_decides_as_the_whole_history_says(rule, keeps, order, num_carried):
    decision, given_verdicts, entered = drive(rule, keeps, order, num_carried=num_carried)
    verdict = dict(given_verdicts)
    if rule.admission == "cursor":
        kept = [g for g in range(100, 100 + entered) if keeps[(g - 100) % len(keeps)]]
        admitted = kept[: rule.num_groups]
        end = admitted[-1] + 1 - 100
        # Nothing ahead of the last admitted one is open.
        assert all(g in verdict for g in range(100, 100 + end))
        carried = list(range(100 + end, 100 + num_carried))
    else:
        arrived = [g for g, keep in given_verdicts if keep]
        admitted = sorted(arrived[: rule.num_groups])
        assert len(arrived) == min(rule.quorum, rule.num_groups)
        end = entered
        carried = [g for g in range(100, 100 + end) if g not in admitted and verdict.get(g, True)]
    dropped = [g for g in range(100, 100 + end) if verdict.get(g) is False]
    assert decision == Decision(
        admitted,
        carried,
        max(0, end - num_carried),
        len(dropped),
        {"same": len(dropped)} if dropped else {},
    )


@settings(max_examples=100, deadline=None)
@given(verdicts, st.lists(st.integers(0, 1000), max_size=60), st.lists(st.integers(0, 1000)))
def test_by_cursor_the_order_of_arrival_does_not_matter(keeps, one, other):
    rule = plan_rule(batch_size=5, admission="cursor", over_sampling=9, max_groups=500)
    assert drive(rule, keeps, one)[0] == drive(rule, keeps, other)[0]


@settings(max_examples=100, deadline=None)
@given(rules, verdicts, st.lists(st.integers(0, 1000), max_size=60))
def test_no_visit_is_lost_and_none_counts_twice(rule, keeps, order):
    decision, given_verdicts, _ = drive(rule, keeps, order)
    dropped = {g for g, keep in given_verdicts if not keep}
    taken = set(range(100, 100 + decision.num_taken))
    assert not set(decision.admitted) & set(decision.carried)
    assert set(decision.admitted) | set(decision.carried) | dropped >= taken
    assert set(decision.admitted) | set(decision.carried) <= taken


@pytest.mark.parametrize("admission", ["cursor", "arrival"])
def test_when_all_is_dropped_it_says_so(admission):
    rule = plan_rule(batch_size=2, admission=admission, max_groups=6)
    with pytest.raises(DataError, match=r"6 groups gave 0 of the 2 .* \(same: 6\).*choose others"):
        drive(rule, [False], [])


def test_too_few_halt_or_train():
    halts = plan_rule(batch_size=4, admission="cursor", max_groups=6)
    with pytest.raises(DataError, match=r"gave 2 of the 4.*max_groups"):
        drive(halts, [True, False, False], [])
    trains = plan_rule(batch_size=4, admission="cursor", max_groups=6, may_fall_short=True)
    decision = drive(trains, [True, False, False], [])[0]
    assert decision.admitted == [100, 103]
    assert decision.num_taken == 4, "what lies behind the last admitted one was not used"


def test_after_the_deadline_one_is_enough():
    ledger = Ledger(plan_rule(batch_size=4, admission="arrival"))
    for group in range(4):
        ledger.enter(group)
    assert ledger.decide(is_late=True) is None
    ledger.judge(2, keep=True)
    assert ledger.decide() is None
    assert ledger.decide(is_late=True) == Decision([2], [0, 1, 3], 4, 0)


def test_reasons_are_counted_in_whatever_order_they_come():
    """A filter of the user's may have many; two shards see them in two orders."""

    def decide(order):
        ledger = Ledger(BatchRule(1, 1, 400, 500, "cursor"))
        for group in range(400):
            ledger.enter(group)
        for group in order:
            ledger.judge(group, keep=group == 399, reason=f"kind {group % 320}")
        return ledger.decide()

    first, second = decide(range(400)), decide(reversed(range(400)))
    assert first.digest == second.digest
    assert first.reasons["kind 319"] == 1 and first.reasons["kind 3"] == 2


def test_a_reason_for_each_group_is_refused():
    ledger = Ledger(BatchRule(1, 1, 20_000, 30_000, "cursor"))
    with pytest.raises(DataError, match=r"more than 10,000 reasons, 'group \d+' the last"):
        for group in range(20_000):
            ledger.enter(group)
            ledger.judge(group, keep=False, reason=f"group {group}")
