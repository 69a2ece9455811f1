"""What an algorithm computes, as pure functions on tensors: no model, no files, no ranks.

Each function cites its paper and states its denominator. Which of them a run uses is decided
elsewhere. Legend of shape suffixes, here and in the modules: B samples, R response tokens of
all of them laid end to end, N trained tokens of one micro-batch laid end to end.

    numerics        precision, the bound on ratios, sums over sequences
    advantages      from rewards, a number a sample
    token_advantages  from rewards or values, a number a token
    losses          of the policy, a number a token
    value           the critic's loss
    kl              distance to a reference policy
    distillation    distance to a teacher
    corrections     weights for tokens that another policy sampled
    aggregation     how numbers of tokens become one number
"""
