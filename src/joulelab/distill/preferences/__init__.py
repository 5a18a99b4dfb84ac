"""Learning from preferences: judged answers, pairs of a better and a worse one, and the losses over them.

pairs             candidates of a prompt, pairs made of them, stored, laid out as rows and batched
judges            scores of answers: by likelihood, by a rubric, by a rule
preference_loss   DPO and its variants, from chunked log-probabilities of the answers
reference         the reference model's log-probabilities, computed once
"""
