"""The last stage of searches whose goal is another than the fastest step.

Measured again side by side until the answer no longer hangs on one trial's noise, then verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sac_search.records import Failure, Outcome
from sac_search.study.baselines import FULL, NONE
from sac_search.study.candidate import Candidate, peak_of
from sac_search.study.finish import (
    CONFIRMING_STEPS,
    FINALISTS,
    Winner,
    choose_winner,
    describe_rejected,
    enough_steps,
    known_as_wrong,
    verified,
    with_confirmed_figures,
)
from sac_search.study.front import pareto_front, spread
from sac_search.study.goal import GoalKind, Limits
from sac_search.study.measurer import Measurer
from sac_search.study.store import Confirmation, StudyStore
from sac_search.worker.session import Verdict

# So many times some candidates are measured side by side, a few of them each time.
_MOST_ROUNDS = 4
MOST_POINTS = 10
"""Points of a front to measure again and to verify."""
_ROUNDS_OF_FRONT = 2
# So many candidates in a row may turn out to have wrong gradients.
_MOST_REJECTED = 10


@dataclass(slots=True, kw_only=True)
class FinalStage:
    """From the best trials to the answer."""

    store: StudyStore
    """The study."""
    measurer: Measurer
    """Who measures."""
    steps: int = CONFIRMING_STEPS
    """Timed steps of each candidate; none are measured again where it is 0."""
    on_verify: Callable[[], None] = lambda: None
    """Told when the first candidate is verified."""
    on_verdict: Callable[[Candidate, Verdict], None] = lambda candidate, verdict: None
    """Told of every new verdict."""
    _failed: dict[str, str] = field(default_factory=dict)

    def run(self) -> Winner:
        """Returns the best policy whose gradients are right; of a whole front the fastest."""
        if self.store.goal.kind is GoalKind.PARETO:
            return self._run_front()
        candidates = self.store.candidates()
        wrong = known_as_wrong(self.store, candidates)
        rejected = self._rejected()
        sound = [c for c in candidates if c not in wrong]
        for number in range(_MOST_REJECTED):
            ranked = self._ranked(sound)
            if number == 0:
                self.on_verify()
            if not ranked:
                break
            winner = choose_winner(self.store, self.measurer, ranked[:1], self.on_verdict)
            rejected += winner.rejected
            if winner.best is not None:
                return replace(winner, rejected=tuple(rejected))
            sound = [c for c in sound if c.policy.key != ranked[0].policy.key]
        self.store.write("winner", None)
        return Winner(best=None, verification=None, rejected=tuple(rejected))

    def _run_front(self) -> Winner:
        """Measures and verifies points of the front, its ends among them; returns the fastest."""
        for _ in range(_ROUNDS_OF_FRONT if self.steps else 0):
            points = spread(self._front(self._sound()), MOST_POINTS)
            confirmed = self._confirmed_keys()
            waiting = [c for c in points if c.policy.key not in confirmed]
            if not waiting or not self.measure_again(waiting):
                break
        self.on_verify()
        # An interrupted search verifies the fastest alone, the same command the others.
        most = MOST_POINTS if self.steps else 1
        best: Candidate | None = None
        for _ in range(_MOST_REJECTED):
            sound, confirmed = self._sound(), self._confirmed_keys()
            known = [c for c in sound if c.policy.key in confirmed] or sound
            points = spread(self._front(known), MOST_POINTS)[-most:]
            if all(self._verify(point) for point in reversed(points)):
                best = points[-1] if points else None
                break
        self.store.write("winner", None if best is None else best.policy.key)
        entries = {entry.key: entry.verification for entry in self.store.verified}
        return Winner(
            best=best,
            verification=None if best is None else entries[best.policy.key],
            rejected=tuple(self._rejected()),
        )

    def _verify(self, candidate: Candidate) -> bool:
        found = verified(self.store, self.measurer, candidate, self.on_verdict)
        if isinstance(found, Failure):
            self._failed[candidate.policy.key] = f"{candidate.name}: {found.kind}"
            return False
        return found.passed

    def _sound(self) -> list[Candidate]:
        """Returns all candidates but those that are known to be wrong, by their best figures."""
        known = with_confirmed_figures(self.store, self.store.candidates())
        wrong = {c.policy.key for c in known_as_wrong(self.store, known)} | self._failed.keys()
        return [c for c in known if c.policy.key not in wrong]

    def _rejected(self) -> list[str]:
        entries = {entry.key: entry.verification for entry in self.store.verified}
        wrong = known_as_wrong(self.store, self.store.candidates())
        found = [describe_rejected(c, entries[c.policy.key]) for c in wrong]
        return [*found, *self._failed.values()]

    def _front(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return pareto_front(candidates, self.store.budget_bytes)

    def settle(self) -> bool:
        """Measures the best again. Returns whether another is best by that."""
        sound = self._sound()
        before = self.store.goal.rank(sound, self._limits())[:1]
        after = self._ranked(sound)[:1]
        return [c.policy.key for c in before] != [c.policy.key for c in after]

    def _ranked(self, sound: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates within the limits, those in front that were measured again.

        Whatever could peak lower than the first of them, but for noise in its step time, has been
        measured again as well, as far as the rounds go.
        """
        store, goal = self.store, self.store.goal
        for _ in range(_MOST_ROUNDS if self.steps else 0):
            known = with_confirmed_figures(store, sound)
            limits = self._limits()
            ranked = goal.rank(known, limits)
            confirmed = self._confirmed_keys()
            best = next((c for c in ranked if c.policy.key in confirmed), None)
            waiting = [
                c
                for c in goal.rank_with_doubt(known, limits)
                if c.policy.key not in confirmed and (best is None or peak_of(c) < peak_of(best))
            ]
            if not waiting:
                break
            chosen = waiting[:FINALISTS]
            sure = next((c for c in ranked if c.policy.key not in confirmed), None)
            if best is None and sure is not None and sure not in chosen:
                chosen[-1] = sure
            if not self.measure_again(chosen):
                break
        known = with_confirmed_figures(store, sound)
        limits = self._limits()
        ranked = goal.rank(known, limits)
        confirmed = self._confirmed_keys()
        if not self.steps:
            # What is better than the ends, and was not measured again yet, is not behind them.
            confirmed -= {c.policy.key for c in known if c.name in (NONE, FULL)}
        return sorted(ranked, key=lambda c: c.policy.key not in confirmed)

    def _limits(self) -> Limits:
        return self.store.limits_for(with_confirmed_figures(self.store, self.store.candidates()))

    def measure_again(self, chosen: Sequence[Candidate]) -> bool:
        """Measures `chosen` side by side, no and full checkpointing along with them.

        The figures join those of earlier rounds: each is held against reference steps beside it.
        Returns whether any of them ran; if none did the moment is a bad one, and nothing is kept.
        """
        ends = [
            c
            for c in self.store.candidates()
            if c.name in (NONE, FULL) and c.measurement is not None
        ]
        policies = {c.policy.key: c.policy for c in [*chosen, *ends]}
        steps = enough_steps(chosen, self.steps)
        found = self.measurer.compare(list(policies.values()), steps)
        outcomes = dict(zip(policies, found, strict=True))
        if all(outcomes[c.policy.key].measurement is None for c in chosen):
            return False
        earlier = self._outcomes()
        for key, outcome in outcomes.items():
            is_end = key not in {c.policy.key for c in chosen}
            if outcome.measurement is not None or not is_end:
                earlier[key] = outcome
        self.store.write(
            "confirmation", Confirmation(keys=tuple(earlier), outcomes=tuple(earlier.values()))
        )
        return True

    def _outcomes(self) -> dict[str, Outcome]:
        confirmation = self.store.confirmation
        if confirmation is None:
            return {}
        return dict(zip(confirmation.keys, confirmation.outcomes, strict=True))

    def _confirmed_keys(self) -> set[str]:
        """Returns the keys of what was measured again and ran."""
        return {key for key, o in self._outcomes().items() if o.measurement is not None}
